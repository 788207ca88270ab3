"""The variational factors of all weights, their moments, and the chain rule from moments back to factors.

A step of training differentiates the likelihood with respect to the moments of the weights by autograd, and goes from
there to the factors, the Kullback-Leibler divergence included, in closed form: a dozen passes over the weights, where
autograd would take sixty.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bnncli.latent.layout import NetworkLayout

VARIANCES = ("exact", "published")
LEAST_SD = 1e-30


@dataclass(frozen=True)
class Factors:
    """Parameters of q, every repeat and layer, weights and biases flat.

    Args:
        mean: (R, W), of the slab. rho: (R, W), its standard deviation is softplus(rho).
        logit: (R, W), log odds of inclusion.
        bias_mean: (R, B). bias_rho: (R, B).
    """

    mean: Tensor
    rho: Tensor
    logit: Tensor
    bias_mean: Tensor
    bias_rho: Tensor

    @property
    def inclusion(self) -> Tensor:
        """alpha, (R, W)."""
        return torch.sigmoid(self.logit)

    @property
    def sd(self) -> Tensor:
        """sigma, (R, W)."""
        return softplus(self.rho)

    @property
    def bias_sd(self) -> Tensor:
        """(R, B)."""
        return softplus(self.bias_rho)

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    def to(self, device: torch.device | str) -> Factors:
        """A copy on another device."""
        return Factors(**{name: tensor.detach().to(device) for name, tensor in self.tensors().items()})


def initial_factors(
    layout: NetworkLayout,
    num_repeats: int,
    generator: torch.Generator,
    *,
    mean_range: float = 0.2,
    logit_range: tuple[float, float] = (0.0, 1.0),
    device: torch.device | str = "cpu",
) -> Factors:
    """Where training starts, uniform: means in +- mean_range, rho in (-5, -4), inclusion logits in logit_range."""

    def uniform(size: int, low: float, high: float) -> Tensor:
        drawn = torch.rand(num_repeats, size, generator=generator, device=generator.device)
        return (low + (high - low) * drawn).to(device)

    num_weights, num_biases = layout.num_weights, layout.num_biases
    return Factors(
        mean=uniform(num_weights, -mean_range, mean_range),
        rho=uniform(num_weights, -5, -4),
        logit=uniform(num_weights, *logit_range),
        bias_mean=uniform(num_biases, -mean_range, mean_range),
        bias_rho=uniform(num_biases, -5, -4),
    )


class Moments(NamedTuple):
    """Moments of the weights (R, W), given a multiplier z of each input (z = 1 where there is none).

    The mean is z times `mean`, the variance `noise` + z^2 times `switching`.

    mean: alpha mu. noise: alpha sigma^2, of the slabs. switching: alpha (1 - alpha) mu^2, of the inclusions; None in
    the published form, whose noise is alpha^2 sigma^2.
    """

    mean: Tensor
    noise: Tensor
    switching: Tensor | None


@torch.no_grad()
def moments(factors: Factors, layout: NetworkLayout, *, variance: str = "exact") -> Moments:
    """The moments of every weight: exact, or `published`, Skaaret-Lund (2022), section 4.1, with Var = alpha^2 sigma^2."""
    first, noise = torch.empty_like(factors.mean), torch.empty_like(factors.mean)
    switching = None if variance == "published" else torch.empty_like(factors.mean)
    outputs = [first, noise] if switching is None else [first, noise, switching]
    for _, (mean, rho, logit, *to) in layout.blocks(factors.mean, factors.rho, factors.logit, *outputs):
        alpha, sd = torch.sigmoid(logit), softplus(rho)
        torch.mul(alpha, mean, out=to[0])
        if switching is None:
            torch.square(sd.mul_(alpha), out=to[1])
        else:
            torch.mul(sd.square_(), alpha, out=to[1])
            # alpha mu^2 - (alpha mu)^2 would cancel where alpha is near 1.
            torch.mul(torch.sigmoid(-logit).mul_(mean), to[0], out=to[2])
    return Moments(first, noise, switching)


def layer_moments(weight: Moments, layout: NetworkLayout) -> list[Moments]:
    """The moments of each layer's weights, (R, out, in), views."""
    means, noises = layout.weights(weight.mean), layout.weights(weight.noise)
    if weight.switching is None:
        return [Moments(mean, noise, None) for mean, noise in zip(means, noises, strict=True)]
    return [Moments(*parts) for parts in zip(means, noises, layout.weights(weight.switching), strict=True)]


def log_sd(sd: Tensor) -> Tensor:
    """log sigma, finite for any; 1e-30 and less count as 1e-30."""
    return sd.clamp(min=LEAST_SD).log_()
