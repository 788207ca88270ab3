"""Fits of many targets that differ in their labels alone: draws of each, as the commands would fit them.

Gaussians at the mode one after the other; hmc about all of these at once, as one batch; flows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from bnncli.covariances.diag import Diag
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.lazy import torch
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.many_labels import ManyLabels

if TYPE_CHECKING:
    from torch import Tensor

NUM_CHAINS = 4  # of each target
_THINNING = 3  # transitions for each draw that is kept: what is left of their correlation must not show in ranks
_WARMUP = 60
_ACCEPTANCE = 0.9

Refit: TypeAlias = "Callable[[Sequence[LastLayerTarget], int, torch.Generator, Progress], Tensor]"


@dataclass(frozen=True)
class GaussianRefit:
    """Draws of the Gaussian at each target's mode.

    Args:
        structure: of its covariance.
    """

    structure: str = "full"

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws."""
        fitted = self.gaussians(targets, generator, progress)
        return torch.stack([one.sample(num_draws, generator).double() for one in fitted])

    def gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress = SILENT
    ) -> list[Gaussian]:
        """At the mode of each; nothing is drawn."""
        start = torch.zeros(targets[0].layout.num_params, dtype=torch.float64)
        task = progress.task("modes", len(targets))
        found = []
        for target in targets:
            found.append(fit_gaussian(target, start=start, structure=self.structure).gaussian)
            task.advance()
        return found


@dataclass(frozen=True)
class HmcRefit:
    """Draws of each target by Hamiltonian Monte Carlo, the chains of all targets as one batch.

    Args:
        num_chains: of each target.
        num_warmup: transitions before the first draw.
        dynamics: split or leapfrog.
    """

    num_chains: int = NUM_CHAINS
    num_warmup: int = _WARMUP
    dynamics: str = "split"

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws, thinned."""
        gaussians = GaussianRefit().gaussians(targets, generator, progress)
        num_params = targets[0].layout.num_params
        identity = torch.eye(num_params, dtype=torch.float64, device=targets[0].device)
        roots = torch.stack([one.covariance.unwhiten(identity).mT for one in gaussians])
        many = ManyLabels(targets, torch.stack([one.mean for one in gaussians]), roots.to(targets[0].dtype))
        each = -(-num_draws // self.num_chains)
        z = sample_hmc(
            many,
            mode=torch.zeros(num_params, dtype=torch.float64),
            covariance=Diag(torch.ones(num_params, dtype=torch.float64)),
            generator=generator,
            num_chains=self.num_chains * len(targets),
            num_warmup=self.num_warmup,
            num_draws=_THINNING * each,
            target_accept=_ACCEPTANCE,
            dynamics=self.dynamics,
            progress=progress,
        ).draws[:, _THINNING - 1 :: _THINNING]
        return many.by_target(z)[:, :num_draws]


@dataclass(frozen=True)
class FlowRefit:
    """Draws of a flow that starts at the Gaussian at each target's mode.

    Args:
        structure: of the Gaussian.
        options: of fit_flow, by their names there.
    """

    structure: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws."""
        gaussians = GaussianRefit(self.structure).gaussians(targets, generator, progress)
        found = []
        for target, base in zip(targets, gaussians, strict=True):
            flow = fit_flow(target, base, generator=generator, progress=progress, **self.options).posterior
            found.append(flow.sample(num_draws, generator).double())
        return torch.stack(found)


@dataclass(frozen=True)
class TrainedRefit:
    """Draws of Gaussians that are trained from zero, one after the other.

    Args:
        fit: makes one, of a target, a start (P,), a generator and what it reports to.
    """

    fit: Callable[[LastLayerTarget, Tensor, torch.Generator, Progress], Gaussian]

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws."""
        fitted = self._gaussians(targets, generator, progress)
        return torch.stack([one.sample(num_draws, generator).double() for one in fitted])

    def gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress = SILENT
    ) -> list[Gaussian]:
        """As trained on each."""
        return list(self._gaussians(targets, generator, progress))

    def _gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress
    ) -> Iterator[Gaussian]:
        """One after the other: its draws may be made before the next is trained."""
        start = torch.zeros(targets[0].layout.num_params, dtype=torch.float64, device=targets[0].device)
        for target in targets:
            yield self.fit(target, start, generator, progress)
