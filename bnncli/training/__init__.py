"""Steps of optimizers, on a GPU as captured graphs."""
