"""The Kullback-Leibler divergence of the factors to the prior, its value and its gradient.

Skaaret-Lund (2022), equations (4.4) and (4.5), the multiplier of section 4.3 included:

    KL = alpha (log(s / sigma) - 1/2 + (sigma^2 + (z mu - m)^2) / (2 s^2) + log(alpha / a)) + (1 - alpha) log((1 - alpha) / (1 - a)),

for slab N(m, s^2) and inclusion a of the prior. In terms of the inclusion's log odds, so that it is finite for any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bnncli.latent.factors import LEAST_SD, Factors, Moments, Workspace, log_sd, moments
from bnncli.latent.prior import LayerPrior, SpikeAndSlab
from bnncli.lazy import no_grad, torch
from bnncli.theta.network import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor


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
    own = prior.layers(factors.mean)
    for index, (mean, rho, logit) in layout.blocks(factors.mean, factors.rho, factors.logit):
        slab = _slab_divergence(
            mean, torch.nn.functional.softplus(rho), own[index], None if multipliers is None else multipliers[index]
        )
        kept = torch.sigmoid(logit) * (slab + torch.nn.functional.logsigmoid(logit) - own[index].log_inclusion)
        dropped = torch.sigmoid(-logit) * (torch.nn.functional.logsigmoid(-logit) - own[index].log_exclusion)
        sums[index] = sums[index] + (kept + dropped).flatten(1).sum(dim=1, dtype=torch.float64)
    return torch.stack(sums, dim=1)


def bias_divergence(mean: Tensor, rho: Tensor, prior: SpikeAndSlab, layout: NetworkLayout) -> Tensor:
    """KL of the biases of each layer, (R, L), nats, of mean (R, B) and rho (R, B)."""
    sd = torch.nn.functional.softplus(rho)
    each = prior.bias_log_sd - log_sd(sd) - 0.5 + (sd.square() + mean.square()) / (2 * prior.bias_sd**2)
    return torch.stack([part.sum(dim=1) for part in layout.biases(each)], dim=1)


@no_grad
def bias_gradients(
    factors: Factors, to_mean: Tensor, to_sd: Tensor, prior: SpikeAndSlab, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of a loss plus `scale` times the biases' KL with respect to bias_mean and bias_rho, (R, B).

    Args:
        to_mean, to_sd: of the loss with respect to the biases' means and standard deviations, (R, B).
    """
    sd, weight = factors.bias_sd, scale / prior.bias_sd**2
    to_rho = torch.add(to_sd, sd, alpha=weight)
    to_rho.sub_(sd.clamp_(min=LEAST_SD).reciprocal_(), alpha=scale).mul_(torch.sigmoid(factors.bias_rho))
    return torch.add(to_mean, factors.bias_mean, alpha=weight), to_rho


@no_grad
def factor_gradients(
    factors: Factors,
    gradient: Moments | None,
    prior: SpikeAndSlab,
    layout: NetworkLayout,
    *,
    scale: float | Tensor,
    variance: str = "exact",
    multipliers: Multipliers | None = None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a loss plus `scale` times the weights' KL with respect to mean, rho and logit, each (R, W).

    Args:
        gradient: of the loss with respect to the moments of the weights, (R, W) each; None for the divergence alone.
        scale: of the divergence, such as 1 / batches.
        variance: as in `moments`, which made them.
        multipliers: as in weight_divergence.
        workspace: that `moments` has just filled for these factors; the result lies in it.
    """
    space = workspace
    if space is None:
        space = Workspace.of(factors, layout)
        moments(factors, layout, variance=variance, workspace=space)
    result = space.to_mean, space.to_rho, space.to_logit
    given = [part for part in gradient or () if part is not None]
    flats = [factors.mean, factors.rho, factors.logit, space.inclusion, space.exclusion, space.sd, *result]
    own = prior.layers(factors.mean)
    is_flat = multipliers is None and prior.is_uniform  # layers make no difference then
    if is_flat:
        own = (own[0].flat,)
    for index, blocks in (layout.chunks if is_flat else layout.blocks)(*flats, *given):
        _, _, _, alpha, beta, *_ = blocks
        multiplier = None if multipliers is None else multipliers[index]
        to_mean, to_rho, to_logit = blocks[6:9]
        d_alpha, scratch = to_logit, space.blocks_like(alpha)
        _divergence_gradient(blocks[:9], own[index], multiplier, scale, scratch)
        if given:
            _moment_gradient(blocks, variance, scratch)
        d_alpha.mul_(alpha).mul_(beta)
        to_mean.mul_(alpha)
        # With respect to rho: the derivative of sd is sigmoid(rho).
        to_rho.mul_(torch.sigmoid(blocks[1], out=scratch[0])).mul_(alpha)
    return result


def _divergence_gradient(
    blocks: Sequence[Tensor],
    prior: LayerPrior,
    multiplier: Multiplier | None,
    scale: float | Tensor,
    scratch: Sequence[Tensor],
) -> None:
    """Sets the derivatives of a block's divergence by alpha mean, sd (both over alpha) and alpha."""
    mean, _, logit, _, _, sd, to_mean, to_sd, to_alpha = blocks
    distance, log = scratch
    precision = prior.precision * scale
    if multiplier is None:
        torch.sub(mean, prior.mean, out=to_mean)
        torch.mul(to_mean, to_mean, out=distance)
    else:
        first, second = multiplier.first.unsqueeze(1), multiplier.second.unsqueeze(1)
        pull = prior.mean * first
        torch.mul(mean, second, out=to_mean).sub_(pull)
        torch.sub(to_mean, pull, out=distance).mul_(mean).add_(prior.mean.square())
    to_mean.mul_(precision)
    distance.addcmul_(sd, sd).mul_(precision / 2)
    torch.clamp(sd, min=LEAST_SD, out=log)
    torch.reciprocal(log, out=to_sd).mul_(-scale).addcmul_(sd, precision)
    torch.sub(logit, log.log_(), out=to_alpha).add_(prior.balance)
    to_alpha.mul_(scale).add_(distance)


def _moment_gradient(blocks: Sequence[Tensor], variance: str, scratch: Sequence[Tensor]) -> None:
    """Adds what comes through the moments of the weights."""
    mean, _, _, alpha, beta, sd, to_mean, to_sd, to_alpha, d_mean, d_noise, *switching = blocks
    one, other = scratch
    to_mean.add_(d_mean)
    to_alpha.addcmul_(mean, d_mean)
    torch.mul(sd, d_noise, out=one)
    if variance == "published":
        one.mul_(alpha)
    to_sd.add_(one, alpha=2)
    to_alpha.addcmul_(sd, one, value=2 if variance == "published" else 1)
    if switching:
        torch.mul(mean, switching[0], out=one)
        to_mean.addcmul_(beta, one, value=2)
        torch.sub(beta, alpha, out=other).mul_(mean)
        to_alpha.addcmul_(other, one)


@no_grad
def multiplier_pull(
    weight: Moments, factors: Factors, prior: SpikeAndSlab, layout: NetworkLayout, workspace: Workspace
) -> list[tuple[Tensor, Tensor]]:
    """Derivatives of each layer's KL by the first and the second moment of its multiplier, (R, in) both.

    Args:
        weight: moments of these factors' weights.
        workspace: whose scratch is used.
    """
    own = prior.layers(factors.mean)
    pulls = [(factors.mean.new_zeros(len(factors.mean), inputs),) * 2 for _, inputs in layout.shapes]
    for index, (kept, mean) in layout.blocks(weight.mean, factors.mean):
        first, second = pulls[index]
        squares = torch.mul(kept, mean, out=workspace.blocks_like(mean)[0])
        pulls[index] = first + kept.sum(dim=1), second + squares.sum(dim=1)
    return [
        (first * -(part.mean * part.precision)[..., 0], second * (part.precision / 2)[..., 0])
        for (first, second), part in zip(pulls, own, strict=True)
    ]


def _slab_divergence(mean: Tensor, sd: Tensor, prior: LayerPrior, multiplier: Multiplier | None) -> Tensor:
    """KL between the Gaussians of weights (R, out, in) that are there."""
    if multiplier is None:
        distance = (mean - prior.mean).square_()
    else:
        first, second = multiplier.first.unsqueeze(1), multiplier.second.unsqueeze(1)
        distance = (mean * second).sub_(2 * prior.mean * first).mul_(mean).add_(prior.mean.square())
    distance.addcmul_(sd, sd).mul_(prior.precision / 2)
    return distance.sub_(log_sd(sd)).add_(prior.log_sd - 0.5)
