"""Mathematics and numbers that know nothing of posteriors."""
