"""The variational factors of all weights, their moments, and the chain rule from moments back to factors.

A step of training differentiates the likelihood with respect to the moments of the weights by autograd, and goes from
there to the factors, the Kullback-Leibler divergence included, in closed form: a dozen passes over the weights, where
autograd would take sixty.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from bnncli.lazy import no_grad, torch
from bnncli.theta.network import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SD = 1e-30
LEAST_VARIANCE = 1e-20  # added, so that the derivative of the square root is finite where nothing varies


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
        return torch.nn.functional.softplus(self.rho)

    @property
    def bias_sd(self) -> Tensor:
        """(R, B)."""
        return torch.nn.functional.softplus(self.bias_rho)

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    def to(self, device: torch.device | str) -> Factors:
        """A copy on another device."""
        return Factors(**{name: tensor.detach().to(device) for name, tensor in self.tensors().items()})


def rho_of(sd: Tensor) -> Tensor:
    """rho of a standard deviation: the inverse of softplus."""
    return sd + torch.log(-torch.expm1(-sd))


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


@dataclass(frozen=True)
class Workspace:
    """Memory that every step uses again: fresh pages would cost more than the arithmetic on them.

    Args:
        inclusion, exclusion, sd: alpha, 1 - alpha and sigma of the step, (R, W), which moments() leaves for the chain rule.
        moments, gradient: of the weights, and of the loss with respect to them.
        to_mean, to_rho, to_logit: gradients of the factors, (R, W).
        scratch: two blocks that stay in a CPU's cache.
    """

    inclusion: Tensor
    exclusion: Tensor
    sd: Tensor
    moments: Moments
    gradient: Moments
    to_mean: Tensor
    to_rho: Tensor
    to_logit: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, factors: Factors, layout: NetworkLayout, *, has_switching: bool = True) -> Workspace:
        """One for these factors.

        Args:
            has_switching: whether the moments keep the two variances apart.
        """

        def new() -> Tensor:
            return torch.empty_like(factors.mean, requires_grad=False)

        def new_moments() -> Moments:
            return Moments(new(), new(), new() if has_switching else None)

        scratch = factors.mean.new_empty(2, layout.block_size(factors.mean))
        return cls(new(), new(), new(), new_moments(), new_moments(), new(), new(), new(), scratch)

    def blocks_like(self, block: Tensor) -> tuple[Tensor, ...]:
        """The scratch in the shape of a block (R, rows, in)."""
        return self.scratch[:, : block.numel()].view(-1, *block.shape).unbind(0)


@no_grad
def moments(
    factors: Factors,
    layout: NetworkLayout,
    *,
    variance: str = "exact",
    is_merged: bool = False,
    workspace: Workspace | None = None,
) -> Moments:
    """The moments of every weight: exact, or `published`, Skaaret-Lund (2022), section 4.1, with Var = alpha^2 sigma^2.

    Args:
        is_merged: put the whole variance into `noise`, which is all that is needed without multipliers.
        workspace: of training, to write them to, all layers together. Without one layer by layer: numbers at the end of a
            block may round otherwise, and predictions shall stay what they were.
    """
    is_split = variance == "exact" and not is_merged
    space = workspace or Workspace.of(factors, layout, has_switching=is_split)
    result = space.moments if is_split else space.moments._replace(switching=None)
    flats = [factors.mean, factors.rho, factors.logit, space.inclusion, space.exclusion, space.sd]
    pieces = layout.blocks if workspace is None else layout.chunks
    for _, (mean, rho, logit, alpha, beta, sd, first, noise, *switching) in pieces(
        *flats, *(part for part in result if part is not None)
    ):
        torch.sigmoid(logit, out=alpha)
        torch.neg(logit, out=beta).sigmoid_()
        sd.copy_(torch.nn.functional.softplus(rho))
        torch.mul(alpha, mean, out=first)
        if variance == "published":
            torch.mul(alpha, sd, out=noise).square_()
            continue
        # alpha mu^2 - (alpha mu)^2 would cancel where alpha is near 1.
        torch.mul(sd, sd, out=noise).mul_(alpha)
        if is_split:
            torch.mul(beta, mean, out=switching[0]).mul_(first)
        else:
            noise.addcmul_(space.blocks_like(mean)[0].copy_(beta).mul_(mean), first)
    return result


def layer_moments(weight: Moments, layout: NetworkLayout) -> list[Moments]:
    """The moments of each layer's weights, (R, out, in), views."""
    means, noises = layout.weights(weight.mean), layout.weights(weight.noise)
    if weight.switching is None:
        return [Moments(mean, noise, None) for mean, noise in zip(means, noises, strict=True)]
    return [Moments(*parts) for parts in zip(means, noises, layout.weights(weight.switching), strict=True)]


def log_sd(sd: Tensor) -> Tensor:
    """log sigma, finite for any; 1e-30 and less count as 1e-30."""
    return sd.clamp(min=LEAST_SD).log_()
