"""The prior of a latent binary network, learnt from its factors.

Hubin and Storvik (2019), arXiv 1903.07594, section 3.3: empirical Bayes.
"""

from __future__ import annotations

from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.lazy import torch


def learnt_prior(model: LatentModel, expected: SpikeAndSlab, weight: float) -> SpikeAndSlab:
    """The prior that maximises the bound and its hyper-prior's density: each layer's inclusion and slab variance.

    In closed form. The hyper-prior is Beta(1, 1) on the inclusion and an inverse gamma(1, 1) on the variance, as if beside the
    layer's n weights s = weight n more inclusions of probability a, and as many slabs N(m, t^2), had been seen, those `expected`:

        inclusion = (sum alpha + s a) / (n + s), variance = (1 + s t^2 / 2 + sum alpha (sigma^2 + (mu - m)^2) / 2) / (2 + s / 2 + sum alpha / 2).

    Without them (weight 0, the thesis's) the inclusions of early epochs, where they start, become the prior, which then keeps them.
    """
    factors = model.factors
    inclusion, variance = [], []
    views = (model.layout.weights(part) for part in (factors.inclusion, factors.mean, factors.sd))
    for index, (alpha, mean, sd) in enumerate(zip(*views, strict=True)):
        offset = mean - expected.slab_mean[:, index, None, None].to(mean)
        total = alpha.flatten(1).sum(dim=1, dtype=torch.float64)
        spread = (alpha * (sd.square() + offset.square())).flatten(1).sum(dim=1, dtype=torch.float64)
        count = alpha[0].numel()
        seen = weight * count
        inclusion.append((total + seen * expected.inclusion[:, index]) / (count + seen))
        slabs = 1 + seen * expected.slab_sd[:, index].square() / 2 + spread / 2
        variance.append(slabs / (2 + seen / 2 + total / 2))
    stacked = torch.stack(inclusion, dim=1).clamp(1e-6, 1 - 1e-6)
    means = expected.slab_mean.expand_as(stacked).clone()
    return SpikeAndSlab(stacked, means, torch.stack(variance, dim=1).sqrt(), bias_sd=expected.bias_sd)
