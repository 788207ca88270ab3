"""From a target to a posterior: mode, Laplace, refinement, sampling, and the ELBO that judges them."""
