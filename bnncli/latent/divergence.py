"""The Kullback-Leibler divergence of the factors to the prior, its value and its gradient.

Skaaret-Lund (2022), equations (4.4) and (4.5), the multiplier of section 4.3 included:

    KL = alpha (log(s / sigma) - 1/2 + (sigma^2 + (z mu - m)^2) / (2 s^2) + log(alpha / a)) + (1 - alpha) log((1 - alpha) / (1 - a)),

for slab N(m, s^2) and inclusion a of the prior. In terms of the inclusion's log odds, so that it is finite for any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from bnncli.latent.factors import LEAST_SD, Factors, Moments, log_sd
from bnncli.latent.layout import NetworkLayout
from bnncli.latent.prior import SpikeAndSlab


class Multiplier(NamedTuple):
    """First and second moment of the multiplier of each input of a layer, (R, in)."""

    first: Tensor
    second: Tensor


Multipliers = Sequence[Multiplier | None]


def weight_divergence(
    factors: Factors, prior: SpikeAndSlab, layout: NetworkLayout, multipliers: Multipliers | None = None
) -> Tensor:
    """KL of all weights of a layer, (R, L) float64, nats.

    Args:
        multipliers: of each layer; None where there is none.
    """
    num_repeats = factors.mean.shape[0]
    sums = [factors.mean.new_zeros(num_repeats, dtype=torch.float64) for _ in range(layout.num_layers)]
    own = [_layer(prior, index, factors.mean) for index in range(layout.num_layers)]
    for index, (mean, rho, logit) in layout.blocks(factors.mean, factors.rho, factors.logit):
        slab = _slab_divergence(mean, softplus(rho), own[index], None if multipliers is None else multipliers[index])
        kept = torch.sigmoid(logit) * (slab + logsigmoid(logit) - own[index].log_inclusion)
        dropped = torch.sigmoid(-logit) * (logsigmoid(-logit) - own[index].log_exclusion)
        sums[index] = sums[index] + (kept + dropped).flatten(1).sum(dim=1, dtype=torch.float64)
    return torch.stack(sums, dim=1)


def bias_divergence(mean: Tensor, rho: Tensor, prior: SpikeAndSlab, layout: NetworkLayout) -> Tensor:
    """KL of the biases of each layer, (R, L), nats, of mean (R, B) and rho (R, B)."""
    sd = softplus(rho)
    each = prior.bias_log_sd - log_sd(sd) - 0.5 + (sd.square() + mean.square()) / (2 * prior.bias_sd**2)
    return torch.stack([part.sum(dim=1) for part in layout.biases(each)], dim=1)


@torch.no_grad()
def factor_gradients(
    factors: Factors,
    gradient: Moments,
    prior: SpikeAndSlab,
    layout: NetworkLayout,
    *,
    scale: float | Tensor,
    variance: str = "exact",
    multipliers: Multipliers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a loss plus `scale` times the weights' KL with respect to mean, rho and logit, each (R, W).

    Args:
        gradient: of the loss with respect to the moments of the weights, (R, W) each.
        scale: of the divergence, such as 1 / batches.
        variance: as in `moments`, which made them.
        multipliers: as in weight_divergence.
    """
    result = tuple(torch.empty_like(factors.mean) for _ in range(3))
    flats = [factors.mean, factors.rho, factors.logit, gradient.mean, gradient.noise, *result]
    if gradient.switching is not None:
        flats.append(gradient.switching)
    own = [_layer(prior, index, factors.mean) for index in range(layout.num_layers)]
    for index, (mean, rho, logit, d_mean, d_noise, to_mean, to_rho, to_logit, *rest) in layout.blocks(*flats):
        multiplier = None if multipliers is None else multipliers[index]
        alpha, beta, sd = torch.sigmoid(logit), torch.sigmoid(-logit), softplus(rho)
        # With respect to the inclusion probability, then its log odds.
        d_alpha = _slab_divergence(mean, sd, own[index], multiplier).add_(logit).sub_(own[index].log_odds).mul_(scale)
        d_alpha.addcmul_(mean, d_mean)
        if variance == "published":
            d_alpha.addcmul_((sd * sd).mul_(alpha), d_noise, value=2)
            d_sd = (alpha * d_noise).mul_(2)
        else:
            d_alpha.addcmul_(sd * sd, d_noise)
            d_sd = 2 * d_noise
        inner = _pull(mean, own[index], multiplier).mul_(scale).add_(d_mean)
        if rest:
            product = mean * rest[0]
            inner.addcmul_(beta, product, value=2)
            d_alpha.addcmul_((beta - alpha).mul_(mean), product)
        torch.mul(d_alpha.mul_(alpha), beta, out=to_logit)
        torch.mul(inner, alpha, out=to_mean)
        # With respect to rho: the derivative of sd is sigmoid(rho).
        d_sd.add_(own[index].precision * scale).mul_(sd).sub_(sd.clamp_(min=LEAST_SD).reciprocal_().mul_(scale))
        torch.mul(d_sd.mul_(torch.sigmoid(rho)), alpha, out=to_rho)
    return result  # type: ignore[return-value]


@torch.no_grad()
def multiplier_pull(factors: Factors, prior: SpikeAndSlab, layout: NetworkLayout) -> list[tuple[Tensor, Tensor]]:
    """Derivatives of each layer's KL by the first and the second moment of its multiplier, (R, in) both."""
    pulls = []
    for index, (mean, logit) in enumerate(
        zip(layout.weights(factors.mean), layout.weights(factors.logit), strict=True)
    ):
        own = _layer(prior, index, mean)
        kept = torch.sigmoid(logit).mul_(mean)
        first = (kept * (own.mean * -own.precision)).sum(dim=1)
        second = (kept.mul_(mean) * (own.precision / 2)).sum(dim=1)
        pulls.append((first, second))
    return pulls


class _LayerPrior(NamedTuple):
    """The prior of one layer, (R or 1, 1, 1) each, in the factors' precision."""

    mean: Tensor
    log_sd: Tensor
    precision: Tensor
    log_odds: Tensor
    log_inclusion: Tensor
    log_exclusion: Tensor


def _layer(prior: SpikeAndSlab, index: int, like: Tensor) -> _LayerPrior:
    inclusion, mean, sd = (part[:, index, None, None] for part in (prior.inclusion, prior.slab_mean, prior.slab_sd))
    parts = (mean, sd.log(), sd.pow(-2), torch.logit(inclusion), inclusion.log(), torch.log1p(-inclusion))
    return _LayerPrior(*(part.to(like) for part in parts))


def _slab_divergence(mean: Tensor, sd: Tensor, prior: _LayerPrior, multiplier: Multiplier | None) -> Tensor:
    """KL between the Gaussians of weights (R, out, in) that are there."""
    if multiplier is None:
        distance = (mean - prior.mean).square_()
    else:
        first, second = multiplier.first.unsqueeze(1), multiplier.second.unsqueeze(1)
        distance = (mean * second).sub_(2 * prior.mean * first).mul_(mean).add_(prior.mean.square())
    distance.addcmul_(sd, sd).mul_(prior.precision / 2)
    return distance.sub_(log_sd(sd)).add_(prior.log_sd - 0.5)


def _pull(mean: Tensor, prior: _LayerPrior, multiplier: Multiplier | None) -> Tensor:
    """Derivative of the slabs' KL by the mean, (R, out, in)."""
    if multiplier is None:
        return (mean - prior.mean).mul_(prior.precision)
    first, second = multiplier.first.unsqueeze(1), multiplier.second.unsqueeze(1)
    return (mean * second).sub_(prior.mean * first).mul_(prior.precision)
