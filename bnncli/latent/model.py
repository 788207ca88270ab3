"""Everything that a latent binary fit learns, and what it starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.latent.factors import Factors, rho_of
from bnncli.latent.multiplier import MultiplierModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.lazy import no_grad, torch
from bnncli.numerics.seeds import source_of
from bnncli.theta.network import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LatentModel:
    """Factors of q, prior, and where the estimator is mnf a multiplier of each layer's inputs.

    Args:
        multipliers: one a layer, or none at all.
    """

    layout: NetworkLayout
    factors: Factors
    prior: SpikeAndSlab
    multipliers: tuple[MultiplierModel, ...] = ()

    @classmethod
    def of_prior(cls, layout: NetworkLayout, prior: SpikeAndSlab) -> LatentModel:
        """One whose q is the prior of its first repeat: its draws are the prior's. On the prior's device."""
        like = prior.inclusion.new_ones(1, layout.num_biases, dtype=torch.float64)
        inclusion, mean, sd = (
            torch.cat(
                [part[:1, i].expand(rows * columns) for i, (rows, columns) in enumerate(layout.shapes)]
            ).unsqueeze(0)
            for part in prior.tensors().values()
        )
        factors = Factors(mean, rho_of(sd), torch.logit(inclusion), 0 * like, rho_of(prior.bias_sd * like))
        return cls(layout, factors, prior)

    @property
    def num_repeats(self) -> int:
        """R."""
        return self.factors.mean.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.factors.mean.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is learnt, masks included, by name."""
        yield from self.factors.tensors().items()
        for index, model in enumerate(self.multipliers):
            for name, tensor in model.tensors():
                yield f"multiplier.{index}.{name}", tensor

    def multiplier_parameters(self) -> list[Tensor]:
        """What is learnt of the multipliers."""
        return [tensor for model in self.multipliers for tensor in model.parameters()]

    @no_grad
    def draw_weights(
        self, repeats: Tensor, generator: torch.Generator, multipliers: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Exact draws of weights (S, W) and biases (S, B) from q, one of each repeat named in (S,).

        Inclusions are drawn as zeros and ones, so that weights which are out are exactly 0.

        Args:
            multipliers: z of each layer's inputs, (S, in), where they are given; else they are drawn as well.
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
        """E[z] of each layer's inputs, (R, in), by draws; nothing without multipliers."""
        means = []
        for model in self.multipliers:
            shape = (self.num_repeats, num_draws, model.start_mean.shape[1])
            noise = torch.randn(*shape, generator=generator, device=generator.device).to(self.device)
            means.append(model.draw(noise)[0].mean(dim=1))
        return means

    def of_repeats(self, rows: slice) -> LatentModel:
        """That of some repeats, to be fitted apart from the others: nothing but masks is shared with them."""
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
        """The same under another prior."""
        return replace(self, prior=prior)
