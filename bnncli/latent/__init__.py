"""Latent binary networks: each weight is a slab N(mu, sigma^2) that an inclusion variable gamma turns on or off.

Hubin and Storvik (2019), arXiv 1903.07594; Skaaret-Lund (2022), chapter 4. For weight w of a layer

    gamma ~ Bernoulli(alpha), w | gamma = 1 ~ N(mu, sigma^2), w | gamma = 0 is exactly 0, alpha = sigmoid(logit), sigma
    = softplus(rho),

in prior and posterior alike; biases are Gaussian and always there. R repeats of a network (other seeds, the same data) are
one batch: R is the first axis of everything.
"""
