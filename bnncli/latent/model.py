"""The model of a latent binary network (Skaaret-Lund et al. 2022): prior, parameters, and the KL divergence between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bnncli.latent.factors import (
    LEAST_SD,
    Factors,
    Moments,
    MultiplierModel,
    Workspace,
    inverse_softplus,
    log_sd,
    moments,
)
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import source_of
from bnncli.parameters.layouts import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor


class LayerPrior(NamedTuple):
    """The prior of one layer, (R or 1, 1, 1) each; balance is log_sd - 1/2 - log_odds."""

    mean: Tensor
    log_sd: Tensor
    precision: Tensor
    log_odds: Tensor
    log_inclusion: Tensor
    log_exclusion: Tensor
    balance: Tensor

    @property
    def flat(self) -> LayerPrior:
        """Return the prior for weights in one row, (R or 1, 1)."""
        return LayerPrior(*(part[..., 0] for part in self))


@dataclass(frozen=True)
class SpikeAndSlab:
    """Prior of every weight of a network; slabs may differ by layer and repeat.

    Args:
        inclusion: (R or 1, L) float64, prior inclusion probability of a weight, between 0 and 1.
        slab_mean: (R or 1, L), mean of an included weight.
        slab_sd: (R or 1, L), its standard deviation.
        bias_sd: standard deviation of the biases, whose mean is zero.

    `is_uniform` says whether the prior is the same in all layers.
    """

    is_uniform: ClassVar[bool]  # set on each instance; not a field, since it follows from the fields
    _layers: ClassVar[dict[tuple[torch.dtype, torch.device], tuple[LayerPrior, ...]]]

    inclusion: Tensor
    slab_mean: Tensor
    slab_sd: Tensor
    bias_sd: float = 1.0

    def __post_init__(self) -> None:
        if not bool(((self.inclusion > 0) & (self.inclusion < 1)).all()):
            raise ValueError("expected a prior inclusion probability between 0 and 1")
        if not bool((self.slab_sd > 0).all()) or not self.bias_sd > 0:
            raise ValueError("expected positive prior standard deviations")
        alike = [bool((part == part[:, :1]).all()) for part in self.tensors().values()]
        object.__setattr__(self, "is_uniform", all(alike))  # computed once: on a GPU it synchronises
        object.__setattr__(self, "_layers", {})

    @classmethod
    def constant(
        cls,
        num_layers: int,
        *,
        inclusion: float = 0.05,
        slab_mean: float = 0.0,
        slab_sd: float = 1.0,
        bias_sd: float = 1.0,
    ) -> SpikeAndSlab:
        """Return the same prior for all layers; the defaults are the thesis's."""
        parts = [torch.full((1, num_layers), value, dtype=torch.float64) for value in (inclusion, slab_mean, slab_sd)]
        return cls(parts[0], parts[1], parts[2], bias_sd)

    @property
    def bias_log_sd(self) -> float:
        """Return the logarithm of the biases' standard deviation."""
        return math.log(self.bias_sd)

    def layers(self, like: Tensor) -> tuple[LayerPrior, ...]:
        """Return the prior of each layer in the precision and on the device of a tensor, cached."""
        key = like.dtype, like.device
        if key not in self._layers:
            self._layers[key] = tuple(self._layer(index, like) for index in range(self.inclusion.shape[1]))
        return self._layers[key]

    def _layer(self, index: int, like: Tensor) -> LayerPrior:
        inclusion, mean, sd = (part[:, index, None, None] for part in (self.inclusion, self.slab_mean, self.slab_sd))
        parts = (mean, sd.log(), sd.pow(-2), torch.logit(inclusion), inclusion.log(), torch.log1p(-inclusion))
        mean, log_sd, precision, log_odds, log_inclusion, log_exclusion = (part.to(like) for part in parts)
        balance = log_sd - 0.5 - log_odds
        return LayerPrior(mean, log_sd, precision, log_odds, log_inclusion, log_exclusion, balance)

    def to(self, device: torch.device | str) -> SpikeAndSlab:
        """Return a copy on another device."""
        return self.from_tensors({name: part.to(device) for name, part in self.tensors().items()}, self.bias_sd)

    def tensors(self) -> dict[str, Tensor]:
        """Return inclusion, mean and standard deviation of the slab, by name."""
        return {"inclusion": self.inclusion, "slab_mean": self.slab_mean, "slab_sd": self.slab_sd}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], bias_sd: float) -> SpikeAndSlab:
        """Invert tensors()."""
        return cls(tensors["inclusion"], tensors["slab_mean"], tensors["slab_sd"], bias_sd)


@dataclass(frozen=True)
class LatentModel:
    """Factors of q, the prior, and for the mnf estimator a multiplier of each layer's inputs.

    Args:
        multipliers: one a layer, or none at all.
    """

    layout: NetworkLayout
    factors: Factors
    prior: SpikeAndSlab
    multipliers: tuple[MultiplierModel, ...] = ()

    @classmethod
    def of_prior(cls, layout: NetworkLayout, prior: SpikeAndSlab) -> LatentModel:
        """Return a model whose q is the prior of the first repeat, on the prior's device: its draws are the prior's."""
        like = prior.inclusion.new_ones(1, layout.num_biases, dtype=torch.float64)
        inclusion, mean, sd = (
            torch.cat(
                [part[:1, i].expand(rows * columns) for i, (rows, columns) in enumerate(layout.shapes)]
            ).unsqueeze(0)
            for part in prior.tensors().values()
        )
        factors = Factors(
            mean, inverse_softplus(sd), torch.logit(inclusion), 0 * like, inverse_softplus(prior.bias_sd * like)
        )
        return cls(layout, factors, prior)

    @property
    def num_repeats(self) -> int:
        """Return R."""
        return self.factors.mean.shape[0]

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return self.factors.mean.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every learnt tensor with its name, masks included."""
        yield from self.factors.tensors().items()
        for index, model in enumerate(self.multipliers):
            for name, tensor in model.tensors():
                yield f"multiplier.{index}.{name}", tensor

    def multiplier_parameters(self) -> list[Tensor]:
        """Return the learnt tensors of the multipliers."""
        return [tensor for model in self.multipliers for tensor in model.parameters()]

    @no_grad
    def draw_weights(
        self, repeats: Tensor, generator: torch.Generator, multipliers: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw weights (S, W) and biases (S, B) exactly from q, one of each repeat named in (S,).

        Inclusions are drawn as zeros and ones, so that excluded weights are exactly 0.

        Args:
            multipliers: z of each layer's inputs, (S, in); drawn when absent.
        """
        factors, count = self.factors, len(repeats)
        generator = source_of(generator, self.layout.num_weights, self.device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device).to(self.device)

        uniform = torch.rand(count, self.layout.num_weights, generator=generator, device=generator.device)
        is_in = uniform.to(self.device) < factors.inclusion[repeats]
        mean = factors.mean[repeats]
        if self.multipliers:
            mean = mean.clone()
            if multipliers is None:
                rows = torch.arange(count, device=self.device)
                noises = [normal(self.num_repeats, count, part.start_mean.shape[1]) for part in self.multipliers]
                multipliers = [
                    part.draw(noise)[0][repeats, rows] for part, noise in zip(self.multipliers, noises, strict=True)
                ]
            for view, z in zip(self.layout.weights(mean), multipliers, strict=True):
                view *= z.unsqueeze(1)
        weights = torch.addcmul(mean, factors.sd[repeats], normal(count, self.layout.num_weights)).mul_(is_in)
        biases = torch.addcmul(
            factors.bias_mean[repeats], factors.bias_sd[repeats], normal(count, self.layout.num_biases)
        )
        return weights, biases

    @no_grad
    def multiplier_means(self, generator: torch.Generator, num_draws: int = 4096) -> list[Tensor]:
        """Estimate E[z] of each layer's inputs, (R, in), from draws; empty without multipliers."""
        means = []
        for model in self.multipliers:
            shape = (self.num_repeats, num_draws, model.start_mean.shape[1])
            noise = torch.randn(*shape, generator=generator, device=generator.device).to(self.device)
            means.append(model.draw(noise)[0].mean(dim=1))
        return means

    def of_repeats(self, rows: slice) -> LatentModel:
        """Copy some repeats, to be fitted apart from the others: only the masks are shared."""
        factors = Factors(**{name: part[rows].clone() for name, part in self.factors.tensors().items()})
        prior = {name: part[rows] if len(part) > 1 else part for name, part in self.prior.tensors().items()}
        multipliers = [
            {name: part if name.endswith("mask") else part.clone() for name, part in one.of_repeats(rows).tensors()}
            for one in self.multipliers
        ]
        return LatentModel(
            self.layout,
            factors,
            SpikeAndSlab.from_tensors(prior, self.prior.bias_sd),
            tuple(MultiplierModel.from_tensors(one) for one in multipliers),
        )

    def with_prior(self, prior: SpikeAndSlab) -> LatentModel:
        """Return the model under another prior."""
        return replace(self, prior=prior)


def learn_prior(model: LatentModel, expected: SpikeAndSlab, weight: float) -> SpikeAndSlab:
    """Return the prior that maximises the bound and its hyper-prior's density: each layer's inclusion and slab variance.

    The solution is in closed form. The hyper-prior is Beta(1, 1) on the inclusion and an inverse gamma(1, 1) on the
    variance, plus s = weight n pseudo-observations (n the layer's weights) from `expected`: s inclusions of probability
    a and s slabs N(m, t^2):

        inclusion = (sum alpha + s a) / (n + s),
        variance = (1 + s t^2 / 2 + sum alpha (sigma^2 + (mu - m)^2) / 2) / (2 + s / 2 + sum alpha / 2).

    Without them (weight 0, the thesis's) the inclusions of the first epochs, close to where they start, become the
    prior and stay there.
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


class Multiplier(NamedTuple):
    """First and second moment of the multiplier of each input of a layer, (R, in)."""

    first: Tensor
    second: Tensor


Multipliers = Sequence[Multiplier | None]


def weight_divergence(
    factors: Factors, prior: SpikeAndSlab, layout: NetworkLayout, multipliers: Multipliers | None = None
) -> Tensor:
    """Return the KL of all weights of a layer, (R, L) float64, nats.

    Args:
        multipliers: of each layer; None for a layer without one.
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
    """Return the KL of the biases of each layer, (R, L), nats, for mean (R, B) and rho (R, B)."""
    sd = torch.nn.functional.softplus(rho)
    each = prior.bias_log_sd - log_sd(sd) - 0.5 + (sd.square() + mean.square()) / (2 * prior.bias_sd**2)
    return torch.stack([part.sum(dim=1) for part in layout.biases(each)], dim=1)


@no_grad
def bias_gradients(
    factors: Factors, to_mean: Tensor, to_sd: Tensor, prior: SpikeAndSlab, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a loss plus `scale` times the biases' KL with respect to bias_mean and bias_rho, (R, B).

    Args:
        to_mean, to_sd: gradients of the loss with respect to the biases' means and standard deviations, (R, B).
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
    """Return the gradients of a loss plus `scale` times the weights' KL with respect to mean, rho and logit, each (R, W).

    Args:
        gradient: of the loss with respect to the moments of the weights, (R, W) each; None for the divergence alone.
        scale: of the divergence, such as 1 / batches.
        variance: as given to `moments`.
        multipliers: as in weight_divergence.
        workspace: just filled by `moments` for these factors; the result lies in it.
    """
    space = workspace
    if space is None:
        space = Workspace.of(factors, layout)
        moments(factors, layout, variance=variance, workspace=space)
    result = space.to_mean, space.to_rho, space.to_logit
    given = [part for part in gradient or () if part is not None]
    flats = [factors.mean, factors.rho, factors.logit, space.inclusion, space.exclusion, space.sd, *result]
    own = prior.layers(factors.mean)
    is_flat = multipliers is None and prior.is_uniform  # all layers can then be treated as one
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
    """Set the derivatives of a block's divergence by alpha mean, sd (both over alpha) and alpha."""
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
    """Add the derivatives through the moments of the weights."""
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
def multiplier_gradients(
    weight: Moments, factors: Factors, prior: SpikeAndSlab, layout: NetworkLayout, workspace: Workspace
) -> list[tuple[Tensor, Tensor]]:
    """Return the derivatives of each layer's KL by the first and the second moment of its multiplier, (R, in) both.

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
    """Return the KL between the slabs of weights (R, out, in)."""
    if multiplier is None:
        distance = (mean - prior.mean).square_()
    else:
        first, second = multiplier.first.unsqueeze(1), multiplier.second.unsqueeze(1)
        distance = (mean * second).sub_(2 * prior.mean * first).mul_(mean).add_(prior.mean.square())
    distance.addcmul_(sd, sd).mul_(prior.precision / 2)
    return distance.sub_(log_sd(sd)).add_(prior.log_sd - 0.5)
