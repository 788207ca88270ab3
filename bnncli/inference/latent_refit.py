"""Draws of latent binary networks without hidden layers, fitted to many targets that differ in their labels alone, all in one fit.

The networks of a fit are apart: each has factors, noise and here labels of its own. The prior is a spike and a slab: truths that labels are simulated by are drawn from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.latent.fit import Plan, fit_latent
from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.latent.scaling import Scaling
from bnncli.lazy import torch
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.network import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LatentRefit:
    """Draws of a latent binary network that is trained on each target's examples; their priors do not count.

    Args:
        start: makes the networks that a fit of so many targets starts from, as many of each, on their device.
        plan: how it goes on; its batches hold no more examples than a target.
        scaling: of the features, None where they are taken as they are.
    """

    start: Callable[[int, torch.Generator], LatentModel]
    plan: Plan
    scaling: Scaling | None = None

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws, for features as they are; weights that are out are 0. The networks of a target take turns.

        Raises:
            NumericError: when the bound of an epoch is not finite.
        """
        count, labels = len(targets), torch.stack([one.labels for one in targets], dim=1)
        start = self.start(count, generator)
        model, _ = fit_latent(
            start,
            targets[0].features,
            labels.repeat(1, start.num_repeats // count, *[1] * (labels.ndim - 2)),
            self.plan,
            generator=generator,
            scaling=self.scaling,
            progress=progress,
        )
        return (
            _draws(model, count * num_draws, generator, self.scaling).unflatten(0, (num_draws, count)).transpose(0, 1)
        )


def prior_draws(
    layout: NetworkLayout, prior: SpikeAndSlab, num: int, generator: torch.Generator, scaling: Scaling | None = None
) -> Tensor:
    """theta (S, P) float64 from the prior of scaled features, for features as they are; weights that are out are 0."""
    exact = None if scaling is None else Scaling(*(part.double() for part in scaling))  # as the prior's factors are
    return _draws(LatentModel.of_prior(layout, prior), num, generator, exact)


def _draws(model: LatentModel, num: int, generator: torch.Generator, scaling: Scaling | None) -> Tensor:
    shift, scale = (None, None) if scaling is None else scaling
    return LatentBinary(model, shift=shift, scale=scale).sample(num, generator).double()
