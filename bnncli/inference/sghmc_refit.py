"""Draws by stochastic-gradient chains of many targets that differ in their labels alone, all chains as one batch, thinned to be nearly independent.

A chain with the learning rate l and the covariance S as preconditioner is one with l' and (l / l') S: targets with rates of their own
move at one rate, in coordinates that are scaled for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.inference.draw_stores import SomeDraws
from bnncli.inference.modes import mode_of
from bnncli.inference.refits import GaussianRefit, TrainedRefit
from bnncli.inference.sghmc import SghmcPlan, preconditioner, sample_sghmc
from bnncli.inference.sghmc_rate import Planned, num_apart, planned
from bnncli.inference.white_coordinates import WhiteCoordinates
from bnncli.lazy import torch
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.many_labels import ManyLabels
from bnncli.theta.initial import initial_theta

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SEED = 2**31


@dataclass(frozen=True)
class SghmcRefit:
    """Draws of each target by chains as long, as hot and with as many examples a step as a fit's.

    Chains start at the target's mode, where a network that was trained on its labels is, or from initialisation. Of each chain no more
    draws are kept than forget one another (num_apart), spread over those that the fit keeps; where the fit's number
    of chains gives fewer than are asked for, there are more chains. Minibatches are the same for all of them.

    Args:
        plan: the fit's; its learning rate counts only where that was given, its batches where the targets have more examples.
        num_chains: the fit's.
        is_given: whether the learning rate was given; else it is chosen anew for each target, as for the fit.
        from_initialisation: where chains start.
        base: makes the Gaussian of each target whose covariance preconditions; None where none does.
    """

    plan: SghmcPlan
    num_chains: int
    is_given: bool = False
    from_initialisation: bool = False
    base: GaussianRefit | TrainedRefit | None = None

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """(M, L, P) float64 for M targets and L draws. Raises NumericError where chains leave all bounds."""
        bases = None if self.base is None else self.base.gaussians(targets, generator, progress)
        most = max(self.num_chains, num_draws)
        starts = self._starts(targets, bases, most, generator)
        chosen = [
            self._planned(target, start[0], None if bases is None else bases[index], generator)
            for index, (target, start) in enumerate(zip(targets, starts, strict=True))
        ]
        plan, (num_chains, each, in_turn) = chosen[0].plan, self._enough(targets, chosen, num_draws)
        rates = torch.tensor([one.plan.learning_rate for one in chosen], dtype=torch.float64, device=starts.device)
        scales = (rates / rates[0]).sqrt()
        roots = scales.view(-1, 1, 1) * _roots(starts, bases)
        many = ManyLabels(targets, starts[:, 0], roots.to(targets[0].dtype))
        z = torch.linalg.solve(roots, (starts[:, :num_chains] - starts[:, :1]).mT).mT.transpose(0, 1).flatten(0, 1)
        square = None
        if plan.is_preconditioned:
            squares = [one.square for one in chosen if one.square is not None]
            square = (torch.stack(squares) * scales.square().unsqueeze(1)).repeat(num_chains, 1)
        store = SomeDraws(_kept_places(plan, len(z), each, in_turn, generator))
        drawn = sample_sghmc(many, plan, start=z, generator=generator, square=square, store=store, progress=progress)
        return many.by_target(drawn.draws)[:, :num_draws]

    def _starts(
        self, targets: Sequence[LastLayerTarget], bases: list[Gaussian] | None, most: int, generator: torch.Generator
    ) -> Tensor:
        """Where the chains of each target start, (M, C, P) float64, as many of them as there may be."""
        layout, device = targets[0].layout, targets[0].device
        if self.from_initialisation:
            seed = int(torch.randint(_MAX_SEED, (1,), generator=generator))
            found = initial_theta(layout, most * len(targets), seed).to(device)
            return found.unflatten(0, (len(targets), most))
        if bases is not None and isinstance(self.base, GaussianRefit):
            modes = [one.mean for one in bases]
        else:
            zeros = torch.zeros(layout.num_params, dtype=torch.float64, device=device)
            modes = [mode_of(one, zeros).theta for one in targets]
        return torch.stack(modes).unsqueeze(1).expand(-1, most, -1)

    def _planned(
        self, target: LastLayerTarget, start: Tensor, base: Gaussian | None, generator: torch.Generator
    ) -> Planned:
        """How the chains of one target move."""
        batch_size = min(self.plan.batch_size, target.num_examples)
        return planned(
            target,
            lambda rate: replace(self.plan, learning_rate=rate, batch_size=batch_size),
            places=[start] if base is None else [start, base.mean],
            learning_rate=self.plan.learning_rate if self.is_given else None,
            whitening=None if base is None else WhiteCoordinates.of(base, target.device, target.dtype),
            squares=generator,
            generator=generator,
        )

    def _enough(
        self, targets: Sequence[LastLayerTarget], chosen: Sequence[Planned], num_draws: int
    ) -> tuple[int, int, int]:
        """The number of chains, of draws that are kept of a cycle, and of how many cycles in turn one is used."""
        apart = [
            num_apart(one.plan, self._softest(target, one), target.num_examples)
            for target, one in zip(targets, chosen, strict=True)
        ]
        in_turn = max(one for _, one in apart)
        used, most = self.plan.num_cycles // in_turn, min(self.plan.num_draws, *(one for one, _ in apart))
        num_chains = max(self.num_chains, -(-num_draws // (used * most)))
        return num_chains, -(-num_draws // (used * num_chains)), in_turn

    def _softest(self, target: LastLayerTarget, chosen: Planned) -> float:
        """What no curvature of -log joint under G is below, near the mode: 0 where nothing better is known.

        1 in the coordinates of the Gaussian with the full curvature; the prior's in those of theta, which the likelihood only adds to.
        """
        if self.base is not None:
            return float(isinstance(self.base, GaussianRefit) and self.base.structure == "full")
        precision = target.prior.diagonal(target.layout, device=target.device)
        return float((precision if chosen.square is None else precision * preconditioner(chosen.square)).min())


def _roots(starts: Tensor, bases: list[Gaussian] | None) -> Tensor:
    """L of each target's coordinates, (M, P, P) float64, or (1, P, P) where they are those of theta, for starts (M, C, P)."""
    identity = torch.eye(starts.shape[2], dtype=torch.float64, device=starts.device)
    return (
        identity.unsqueeze(0) if bases is None else torch.stack([one.covariance.unwhiten(identity).mT for one in bases])
    )


def _kept_places(plan: SghmcPlan, num_chains: int, each: int, in_turn: int, generator: torch.Generator) -> Tensor:
    """Which of the plan's draws are kept of each chain, (T', C): evenly many of every cycle that is used, from a start at random.

    So each is as any of the plan's draws is, which in cycles differ by where they come.
    """
    used = plan.num_cycles // in_turn
    start = torch.rand(used, 1, num_chains, generator=generator, dtype=torch.float64)
    within = ((start + torch.arange(each).view(1, -1, 1)) * (plan.num_draws / each)).long()
    cycles = torch.arange(1, used + 1) * in_turn - 1
    return (within.clamp(max=plan.num_draws - 1) + plan.num_draws * cycles.view(-1, 1, 1)).flatten(0, 1)
