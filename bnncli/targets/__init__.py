"""Log posteriors over theta: what every fit, sampler and diagnostic sees of the data."""
