"""Log posteriors over theta: the view of the data for all fits, samplers and diagnostics."""
