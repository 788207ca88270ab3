"""Hamiltonian Monte Carlo on a log posterior: all chains at once, in coordinates whitened by a Gaussian."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from bnncli.covariances import Covariance, root_for_many
from bnncli.errors import Interrupted, NumericError
from bnncli.inference.dynamics import (
    DYNAMICS,
    MAX_STEPS,
    TURN,
    DrawStore,
    GraphMover,
    MemoryDraws,
    Mover,
    NoResume,
    PlainMover,
    ResumeStore,
    State,
    StepSizeAdaptation,
    Transition,
    WhitenedPotential,
    adaptation_statistic,
    mean_of_chains,
    transition,
)
from bnncli.lazy import torch
from bnncli.posteriors import standard_normal
from bnncli.progress import SILENT, Progress
from bnncli.system.workers import Team, alone, shares
from bnncli.targets.target import WholeTarget

if TYPE_CHECKING:
    from torch import Tensor


# The first part of the warm-up only brings the chains from their over-dispersed starts to where the posterior is.
SETTLING_SHARE = 0.4
SETTLING_STEPS = 16
SHORT = 0.1  # posterior standard deviations: steps by which chains move where the Gaussian explains little, and turns about nothing better


class SamplerSettings(NamedTuple):
    """How a run warms up and moves; first_step: the step size that it tries first."""

    num_warmup: int
    target_accept: float
    dynamics: str
    first_step: float = TURN / 4

    @property
    def num_settling(self) -> int:
        """Transitions that bring the chains to where the posterior is."""
        return math.ceil(SETTLING_SHARE * self.num_warmup)

    def new_adaptation(self) -> StepSizeAdaptation:
        """The search for the step size, before the first transition that counts for it."""
        return StepSizeAdaptation.start(initial=self.first_step, target_accept=self.target_accept)


class Walk(NamedTuple):
    """Where all chains are, and what the warm-up has found: all that the next transition needs but the generator.

    Args:
        state: of all chains.
        adaptation: of the step size.
        smoothed: (C,), each chain's recent acceptance rate in the warm-up.
        num_done: transitions made, warm-up included.
        num_gradients: evaluations in all of them, of each chain; None where it goes on from a state that did not count them.
    """

    state: State
    adaptation: StepSizeAdaptation
    smoothed: Tensor
    num_done: int
    num_gradients: int | None = 0

    @classmethod
    def start(cls, potential: WhitenedPotential, settings: SamplerSettings, z: Tensor) -> Walk:
        """Chains at z (C, P), before the first transition."""
        smoothed = torch.full(z.shape[:1], settings.target_accept, dtype=torch.float64, device=z.device)
        return cls(potential.state(z), settings.new_adaptation(), smoothed, 0)

    def more_gradients(self, count: int) -> int | None:
        """The evaluations after so many more."""
        return None if self.num_gradients is None else self.num_gradients + count

    def to_tensors(self) -> dict[str, Tensor]:
        """All of it, to be stored."""
        return {
            **self.state._asdict(),
            "adaptation": self.adaptation.to_tensor(),
            "smoothed": self.smoothed,
            "num_done": torch.tensor(self.num_done),
            "num_gradients": torch.tensor(-1 if self.num_gradients is None else self.num_gradients),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> Walk:
        """The inverse of to_tensors."""
        return cls(
            State(*(tensors[name].to(device) for name in State._fields)),
            StepSizeAdaptation.from_tensor(tensors["adaptation"]),
            tensors["smoothed"].to(device),
            int(tensors["num_done"]),
            _counted(tensors.get("num_gradients")),
        )


def _counted(stored: Tensor | None) -> int | None:
    """The evaluations that a state has; None where it has none."""
    return None if stored is None or int(stored) < 0 else int(stored)


def advance(
    potential: WhitenedPotential,
    walk: Walk,
    settings: SamplerSettings,
    *,
    generator: torch.Generator,
    mover: Mover | None = None,
) -> tuple[Walk, Transition]:
    """One transition of all chains, of the warm-up as long as that lasts; mover as for `transition`."""
    if walk.num_done >= settings.num_warmup:
        step_size = walk.adaptation.final
        result = transition(potential, walk.state, generator, step_size, settings.dynamics, mover=mover)
        made = walk.more_gradients(result.num_steps)
        return walk._replace(state=result.state, num_done=walk.num_done + 1, num_gradients=made), result
    adaptation = walk.adaptation
    if walk.num_done == settings.num_settling:
        # The steps that freed stuck chains say nothing about the steps to sample with.
        adaptation = settings.new_adaptation()
        if potential.pivot is not None and walk.adaptation.current > SHORT:
            potential.pivot.copy_(mean_of_chains(walk.state.z, walk.state.gradient))
    is_settling = walk.num_done < settings.num_settling
    max_steps = SETTLING_STEPS if is_settling else MAX_STEPS
    result = transition(
        potential, walk.state, generator, adaptation.current, settings.dynamics,
        max_steps=max_steps, is_settling=is_settling, mover=mover,
    )  # fmt: skip
    smoothed = 0.7 * walk.smoothed + 0.3 * result.acceptance
    if result.is_falling is not None:
        smoothed = torch.where(result.is_falling, walk.smoothed, smoothed)
    found = adaptation_statistic(smoothed, result.acceptance, settings.target_accept, result.is_falling)
    if found is not None:
        adaptation = adaptation.update(found)
    made = walk.more_gradients(result.num_steps)
    return Walk(result.state, adaptation, smoothed, walk.num_done + 1, made), result


MOST_GROUPS = 64


def chain_groups(num_chains: int, *, smallest: int) -> list[slice]:
    """The chains of each group: at least `smallest` (all of them, where they are fewer), and at most 64 groups."""
    count = max(1, min(num_chains // smallest, MOST_GROUPS))
    return [slice(part.start, part.stop) for part in shares(num_chains, count)]


class Workers(NamedTuple):
    """Processes that share out chains.

    Args:
        smallest_group: chains that one product is of at least, where fewer would cost more each.
    """

    team: Team
    smallest_group: int = 1

    def mover(
        self,
        potential: WhitenedPotential,
        dynamics: str,
        num_chains: int,
        new_mover: Callable[[], Mover | None],
    ) -> SharedMover:
        """What moves all chains; arguments as of SharedMover, whose groups move plainly where `new_mover` makes none."""
        groups = chain_groups(num_chains, smallest=self.smallest_group)
        return SharedMover(potential, groups, self.team, lambda: new_mover() or PlainMover(potential, dynamics))


class SharedMover:
    """Makes the trajectories of all chains, this worker those of its groups; ends have their energy.

    Args:
        potential: that they move in.
        groups: of the chains, the same on all workers.
        team: the workers.
        new_mover: makes what moves one group.
    """

    has_energy: ClassVar[bool] = True

    def __init__(
        self, potential: WhitenedPotential, groups: list[slice], team: Team, new_mover: Callable[[], Mover]
    ) -> None:
        self.potential, self.groups, self.team = potential, groups, team
        self._shares = [groups[part.start : part.stop] for part in shares(len(groups), team.size)]
        self._movers = [new_mover() for _ in self._shares[team.rank]]

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients, on every worker."""
        num_params = momentum.shape[1]
        own = momentum.new_zeros(max(map(_num_chains, self._shares)), 3 * num_params + 1)
        start = 0
        with alone():
            for group, mover in zip(self._shares[self.team.rank], self._movers, strict=True):
                here = State(*(part[group] for part in state))
                end, turned = mover(here, momentum[group], step_size=step_size, num_steps=num_steps)
                end = self.potential.with_energy(end)
                stop = start + len(turned)
                own[start:stop] = torch.cat([end.z, end.gradient, turned, end.potential.unsqueeze(1)], dim=1)
                start = stop
        found = self.team.gather(own)
        ends = torch.cat([part[: _num_chains(share)] for part, share in zip(found, self._shares, strict=True)])
        z, gradient, turned = (ends[:, place : place + num_params] for place in range(0, 3 * num_params, num_params))
        return State(z, ends[:, -1], gradient), turned


def _num_chains(groups: list[slice]) -> int:
    return sum(group.stop - group.start for group in groups)


# All of theta (C, P), for draws (C, P') of a part of it, and the log density of what is added, (C,); the generator draws that.
Completion: TypeAlias = "Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]"
OVERDISPERSION = 2.0  # standard deviation of the starts, in posterior standard deviations
_LARGE = 2048  # parameters
_STATISTICS = ("log_joint", "energy", "acceptance_rate", "diverging")


@dataclass(frozen=True)
class HmcRun:
    """What a sampler returns.

    Args:
        draws: (C, T, P), float32; may be mapped from a file.
        log_joint: (C, T), float64, nats.
        energy: (C, T), of each kept state, nats; None where the sampler does not tell.
        acceptance_rate: (C, T), in [0, 1].
        diverging: (C, T), whether the trajectory's energy error was above 1000 nats or not finite.
        step_size: after warm-up, in posterior standard deviations.
        n_steps: (C, T), gradient evaluations of each trajectory.
        num_gradients: of each chain, the warm-up's with them; None where the sampler does not tell.
        position: (C, P'), float64, where the chains are in the whitened space; None where the sampler does not tell.
    """

    draws: Tensor
    log_joint: Tensor
    energy: Tensor | None
    acceptance_rate: Tensor
    diverging: Tensor
    step_size: float
    n_steps: Tensor
    num_gradients: int | None = None
    position: Tensor | None = None


def sample_hmc(
    target: WholeTarget,
    *,
    mode: Tensor,
    covariance: Covariance,
    generator: torch.Generator,
    num_chains: int = 16,
    num_warmup: int = 60,
    num_draws: int = 160,
    target_accept: float = 0.8,
    dispersion: float = OVERDISPERSION,
    go_on: HmcRun | None = None,
    dynamics: str = "split",
    coarse: Callable[[Tensor], Tensor] | None = None,
    is_enough: Callable[[Tensor], bool] | None = None,
    max_draws: int | None = None,
    complete: Completion | None = None,
    store: DrawStore | None = None,
    resume: ResumeStore | None = None,
    workers: Workers | None = None,
    progress: Progress = SILENT,
) -> HmcRun:
    """Draws from target, num_chains * num_draws of them after warm-up, or as many as it takes.

    Args:
        target: the log posterior, with all data.
        mode: (P,), the mode or a point near it.
        covariance: of a Gaussian there; any gives the right distribution, a good one gives it soon.
        generator: of starts, momenta, trajectory lengths and acceptances; on the CPU, and its state is stored.
        num_chains: all in one matrix product.
        num_warmup: transitions a chain makes first, in which the step size is found.
        num_draws: transitions kept, a chain.
        target_accept: acceptance rate that the step size aims for.
        dispersion: chains start from N(mode, dispersion^2 Sigma).
        go_on: of as many chains on a similar target; they start where those are in the whitened space, with steps as long.
        dynamics: split or leapfrog.
        coarse: the gradient (C, P) at mode + displacement (C, P) that kicks, while energies stay the target's; its own by default.
        is_enough: judges the draws (C, T, P) after num_draws, and again after every num_draws / 2 more, until it
            says True or there are max_draws a chain (20 num_draws by default).
        complete: what makes all of theta of draws, where the target's is a part of it. Draws and their log joint are of
            the whole, energies of what moves.
        store: where draws are kept; in memory by default.
        resume: where the run is kept while it is unfinished; nowhere by default.
        workers: that share out the chains; by default each moves all of them, and what the target shares out is its own affair.
        progress: advanced once a transition; an Interrupted that it raises stores the state first.

    Raises:
        NumericError: when all chains diverge after warm-up.
    """
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics: expected one of {', '.join(DYNAMICS)}; got {dynamics!r}")
    mode = mode.to(target.device).double()
    # Of many parameters whitening in float64 would cost more than the gradients, whose products have float32's digits.
    is_large = target.dtype != torch.float64 and len(mode) > _LARGE
    whitening = root_for_many(covariance, target.device, torch.float32 if is_large else None)
    potential = WhitenedPotential(target, mode, whitening, coarse, pivot=torch.zeros_like(mode))
    settings = SamplerSettings(num_warmup, target_accept, dynamics)
    if go_on is not None:
        settings = settings._replace(first_step=go_on.step_size)
    new_mover = partial(GraphMover.where_possible, potential, dynamics, warn=progress.warn)
    mover = new_mover() if workers is None else workers.mover(potential, dynamics, num_chains, new_mover)
    resume = resume or NoResume()
    kept = KeptDraws(store or MemoryDraws())
    walk = _restored_walk(resume, kept, generator, potential)
    if walk is None:
        if go_on is None or go_on.position is None:
            z = dispersion * standard_normal(num_chains, mode.shape[0], generator, target.device)
        else:
            z = go_on.position
        walk = Walk.start(potential, settings, z)
    chains = _Chains(potential, settings, mover, complete, generator, kept, walk)
    del walk  # of the start: as large as the chains, and soon of the past
    try:
        for goal in goals(num_draws, max_draws if is_enough else num_draws):
            if goal < kept.num_draws:
                continue  # judged before the run was stored
            task = progress.task(f"hmc, {num_chains} chains", num_warmup + goal - chains.walk.num_done)
            while chains.walk.num_done < num_warmup + goal:
                chains.advance()
                resume.offer(chains.to_tensors)
                task.advance(note=f"step size {chains.walk.adaptation.current:.2f}")
            if is_enough is None or is_enough(kept.store.draws()):
                break
    except Interrupted:
        resume.offer(chains.to_tensors, is_last=True)
        raise
    found = kept.run(chains.walk.adaptation.final)
    return replace(found, num_gradients=chains.walk.num_gradients, position=chains.walk.state.z)


def _restored_walk(
    resume: ResumeStore, kept: KeptDraws, generator: torch.Generator, potential: WhitenedPotential
) -> Walk | None:
    """Where an unfinished run was, its draws back in `kept`, generator and pivot as they were; None where there is none."""
    stored = resume.restore()
    if stored is None:
        return None
    device = potential.target.device
    kept.restore(stored, device)
    generator.set_state(stored["generator"])
    if potential.pivot is not None:
        potential.pivot.copy_(stored["pivot"])
    return Walk.from_tensors(stored, device)


def goals(num_draws: int, max_draws: int | None) -> Iterator[int]:
    """Draws a chain at which a run is judged: num_draws, then half as many more each time, up to max_draws."""
    largest = 20 * num_draws if max_draws is None else max_draws
    yield from itertools.takewhile(lambda goal: goal < largest, itertools.count(num_draws, max(1, num_draws // 2)))
    yield largest


class KeptDraws:
    """The draws as they come, in their store, and a few numbers of each; not the states, which are many times larger."""

    def __init__(self, store: DrawStore) -> None:
        self.store = store
        self.numbers: list[tuple[Tensor, ...]] = []
        self.num_steps: list[int] = []

    @property
    def num_draws(self) -> int:
        """Draws kept, a chain."""
        return len(self.num_steps)

    def add(self, theta: Tensor, log_joint: Tensor, result: Transition) -> None:
        """One more draw of every chain, theta (C, P), and its log joint (C,)."""
        self.store.append(theta.float())
        self.numbers.append((log_joint, result.energy, result.acceptance, result.is_divergent))
        self.num_steps.append(result.num_steps)

    def to_tensors(self) -> dict[str, Tensor]:
        """The numbers, (C, T) each, and the steps (T,)."""
        stacked = [torch.stack(part, dim=1) for part in zip(*self.numbers, strict=True)]
        steps = {"num_steps": torch.tensor(self.num_steps, dtype=torch.int64)}
        return steps | dict(zip(_STATISTICS, stacked, strict=True) if stacked else ())

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """The inverse of to_tensors; the draws are in the store already."""
        self.num_steps = tensors["num_steps"].tolist()
        if self.num_steps:
            self.numbers = list(zip(*(tensors[name].to(device).unbind(dim=1) for name in _STATISTICS), strict=True))

    def run(self, step_size: float) -> HmcRun:
        """All of it, chain axis first. Raises NumericError when every chain diverges."""
        tensors = self.to_tensors()
        if tensors["diverging"].all():
            raise NumericError(
                "every trajectory of every chain diverged after warm-up",
                hint="use more \0warmup\0, or a larger \0prior_precision\0",
            )
        num_steps = tensors.pop("num_steps").repeat(tensors["diverging"].shape[0], 1)
        return HmcRun(self.store.draws(), step_size=step_size, n_steps=num_steps, **tensors)  # type: ignore[arg-type]


@dataclass
class _Chains:
    """All chains of a run: what they move by, where they are, and what is kept of them."""

    potential: WhitenedPotential
    settings: SamplerSettings
    mover: Mover | None
    complete: Completion | None
    generator: torch.Generator
    kept: KeptDraws
    walk: Walk

    def advance(self) -> None:
        """One transition, and after the warm-up one draw more of every chain."""
        self.walk, result = advance(
            self.potential, self.walk, self.settings, generator=self.generator, mover=self.mover
        )
        if self.walk.num_done > self.settings.num_warmup:
            self.kept.add(*self._whole(), result)

    def _whole(self) -> tuple[Tensor, Tensor]:
        """All of theta (C, P) where the chains are, and its log joint (C,)."""
        theta, log_joint = self.potential.theta(self.walk.state.z), -self.walk.state.potential
        if self.complete is None:
            return theta, log_joint
        whole, outside = self.complete(theta, self.generator)
        return whole, log_joint + outside

    def to_tensors(self) -> dict[str, Tensor]:
        """All that a run continues from, to be stored."""
        pivot = {} if self.potential.pivot is None else {"pivot": self.potential.pivot}
        return {**self.walk.to_tensors(), **pivot, **self.kept.to_tensors(), "generator": self.generator.get_state()}
