"""Hamiltonian Monte Carlo on a log posterior: all chains at once, in coordinates whitened by a Gaussian."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

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
from bnncli.structures import Covariance, root_for_many
from bnncli.system.workers import Team, shares, working_alone
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.target import WholeTarget
from bnncli.targets.variants import SubsetResidual, residual_sizes

if TYPE_CHECKING:
    from torch import Tensor


# The first part of the warm-up only moves the chains from their overdispersed starts into the posterior.
SETTLING_SHARE = 0.4
SETTLING_STEPS = 16
# posterior standard deviations: smaller steps mean that the Gaussian explains little, and a better pivot would not help
SHORT = 0.1


class SamplerSettings(NamedTuple):
    """Warm-up and dynamics of a run; first_step is the initial step size of the adaptation."""

    num_warmup: int
    target_accept: float
    dynamics: str
    first_step: float = TURN / 4

    @property
    def num_settling(self) -> int:
        """Number of transitions that move the chains into the posterior."""
        return math.ceil(SETTLING_SHARE * self.num_warmup)

    def new_adaptation(self) -> StepSizeAdaptation:
        """Return a fresh step-size adaptation."""
        return StepSizeAdaptation.start(initial=self.first_step, target_accept=self.target_accept)


class SamplerState(NamedTuple):
    """The state of the sampler: all that the next transition needs except the random generator.

    Args:
        state: of all chains.
        adaptation: of the step size.
        smoothed: (C,), recent acceptance rate of each chain in the warm-up.
        num_done: number of transitions, including warm-up.
        num_gradients: evaluations per chain so far; None after resuming from a state that did not count them.
    """

    state: State
    adaptation: StepSizeAdaptation
    smoothed: Tensor
    num_done: int
    num_gradients: int | None = 0

    @classmethod
    def start(cls, potential: WhitenedPotential, settings: SamplerSettings, z: Tensor) -> SamplerState:
        """Start chains at z (C, P)."""
        smoothed = torch.full(z.shape[:1], settings.target_accept, dtype=torch.float64, device=z.device)
        return cls(potential.state(z), settings.new_adaptation(), smoothed, 0)

    def more_gradients(self, count: int) -> int | None:
        """Return the number of evaluations after `count` more."""
        return None if self.num_gradients is None else self.num_gradients + count

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all fields as tensors."""
        return {
            **self.state._asdict(),
            "adaptation": self.adaptation.to_tensor(),
            "smoothed": self.smoothed,
            "num_done": torch.tensor(self.num_done),
            "num_gradients": torch.tensor(-1 if self.num_gradients is None else self.num_gradients),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> SamplerState:
        """Invert to_tensors."""
        return cls(
            State(*(tensors[name].to(device) for name in State._fields)),
            StepSizeAdaptation.from_tensor(tensors["adaptation"]),
            tensors["smoothed"].to(device),
            int(tensors["num_done"]),
            _read_count(tensors.get("num_gradients")),
        )


def _read_count(stored: Tensor | None) -> int | None:
    """Return the stored number of evaluations, or None."""
    return None if stored is None or int(stored) < 0 else int(stored)


def advance(
    potential: WhitenedPotential,
    walk: SamplerState,
    settings: SamplerSettings,
    *,
    generator: torch.Generator,
    mover: Mover | None = None,
) -> tuple[SamplerState, Transition]:
    """Make one transition of all chains, adapting during warm-up; mover as in `transition`."""
    if walk.num_done >= settings.num_warmup:
        step_size = walk.adaptation.final
        result = transition(potential, walk.state, generator, step_size, settings.dynamics, mover=mover)
        made = walk.more_gradients(result.num_steps)
        return walk._replace(state=result.state, num_done=walk.num_done + 1, num_gradients=made), result
    adaptation = walk.adaptation
    if walk.num_done == settings.num_settling:
        # Steps that freed stuck chains say nothing about steps for sampling.
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
    return SamplerState(result.state, adaptation, smoothed, walk.num_done + 1, made), result


MOST_GROUPS = 64


def chain_groups(num_chains: int, *, smallest: int) -> list[slice]:
    """Split the chains into at most 64 groups of at least `smallest` (or one group of all, if fewer)."""
    count = max(1, min(num_chains // smallest, MOST_GROUPS))
    return [slice(part.start, part.stop) for part in shares(num_chains, count)]


class Workers(NamedTuple):
    """Worker processes that share the chains.

    Args:
        smallest_group: smallest number of chains per matrix product; smaller products cost more per chain.
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
        """Return a mover of all chains; groups for which `new_mover` returns None use PlainMover."""
        groups = chain_groups(num_chains, smallest=self.smallest_group)
        return SharedMover(potential, groups, self.team, lambda: new_mover() or PlainMover(potential, dynamics))


class SharedMover:
    """Computes the trajectories of all chains, this worker those of its groups; returned states have their energy.

    Args:
        potential: their potential.
        groups: groups of chains, the same on all workers.
        team: the workers.
        new_mover: creates a mover for one group.
    """

    has_energy: ClassVar[bool] = True

    def __init__(
        self, potential: WhitenedPotential, groups: list[slice], team: Team, new_mover: Callable[[], Mover]
    ) -> None:
        self.potential, self.groups, self.team = potential, groups, team
        self._shares = [groups[part.start : part.stop] for part in shares(len(groups), team.size)]
        self._movers = [new_mover() for _ in self._shares[team.rank]]

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """Return the chains and momenta (C, P) after num_steps gradients, on every worker."""
        num_params = momentum.shape[1]
        own = momentum.new_zeros(max(map(_num_chains, self._shares)), 3 * num_params + 1)
        start = 0
        with working_alone():
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


# Maps draws (C, P') of part of theta to all of theta (C, P), drawing the rest with the generator, and its log density
# (C,).
Completion: TypeAlias = "Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]"
OVERDISPERSION = 2.0  # standard deviation of the starts, in posterior standard deviations
_LARGE = 2048  # parameters
_STATISTICS = ("log_joint", "energy", "acceptance_rate", "diverging")


@dataclass(frozen=True)
class HmcRun:
    """The result of a sampler.

    Args:
        draws: (C, T, P), float32; may be memory-mapped.
        log_joint: (C, T), float64, nats.
        energy: (C, T), of each kept state, nats; None if the sampler has none.
        acceptance_rate: (C, T), in [0, 1].
        diverging: (C, T), whether the trajectory's energy error was above 1000 nats or not finite.
        step_size: after warm-up, in posterior standard deviations.
        n_steps: (C, T), gradient evaluations of each trajectory.
        num_gradients: evaluations per chain, including warm-up; None if unknown.
        position: (C, P'), float64, final whitened coordinates of the chains; None if unknown.
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
    residual: Callable[[Tensor], Tensor] | None = None,
    is_enough: Callable[[Tensor], bool] | None = None,
    max_draws: int | None = None,
    complete: Completion | None = None,
    store: DrawStore | None = None,
    resume: ResumeStore | None = None,
    workers: Workers | None = None,
    progress: Progress = SILENT,
) -> HmcRun:
    """Sample from a target: num_chains * num_draws draws after warm-up, or as many as `is_enough` requires.

    Args:
        target: the log posterior, with all data.
        mode: (P,), the mode or a point near it.
        covariance: of a Gaussian there; affects efficiency, not correctness.
        generator: CPU generator of starts, momenta, trajectory lengths and acceptances; its state is stored.
        num_chains: number of chains, all in one matrix product.
        num_warmup: warm-up transitions per chain, which adapt the step size.
        num_draws: kept transitions per chain.
        target_accept: goal of the acceptance rate.
        dispersion: chains start from N(mode, dispersion^2 Sigma).
        go_on: previous run with as many chains on a similar target; the chains continue from its whitened positions and
            its step size.
        dynamics: split or leapfrog.
        coarse: gradient (C, P) at mode + displacement (C, P) for kicks; energies remain the target's. Its own by
            default.
        residual: the same beyond the log density of the Gaussian, which must have the target's own Hessian; replaces coarse.
        is_enough: judges the draws (C, T, P) after num_draws and after every num_draws / 2 more, until it returns True
            or there are max_draws per chain (20 num_draws by default).
        complete: adds the parameters that the target does not include. Draws and their log joint are of the whole,
            energies of the sampled part.
        store: draw store; in memory by default.
        resume: resume store of the unfinished run; none by default.
        workers: share the chains; by default every process moves all chains.
        progress: advances once per transition; if it raises Interrupted, the state is stored first.

    Raises:
        NumericError: all chains diverge after warm-up.
    """
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics: expected one of {', '.join(DYNAMICS)}; got {dynamics!r}")
    mode = mode.to(target.device).double()
    # For many parameters, float64 whitening would cost more than the gradients, whose products are float32.
    is_large = target.dtype != torch.float64 and len(mode) > _LARGE
    whitening = root_for_many(covariance, target.device, torch.float32 if is_large else None)
    potential = WhitenedPotential(target, mode, whitening, coarse, residual, pivot=torch.zeros_like(mode))
    settings = SamplerSettings(num_warmup, target_accept, dynamics)
    if go_on is not None:
        settings = settings._replace(first_step=go_on.step_size)
    new_mover = partial(GraphMover.where_possible, potential, dynamics, warn=progress.warn)
    mover = new_mover() if workers is None else workers.mover(potential, dynamics, num_chains, new_mover)
    resume = resume or NoResume()
    kept = DrawRecorder(store or MemoryDraws())
    walk = _restore_state(resume, kept, generator, potential)
    if walk is None:
        if go_on is None or go_on.position is None:
            z = dispersion * standard_normal(num_chains, mode.shape[0], generator, target.device)
        else:
            z = go_on.position
        walk = SamplerState.start(potential, settings, z)
    chains = _Chains(potential, settings, mover, complete, generator, kept, walk)
    del walk  # as large as the chains, and soon outdated
    try:
        for goal in draw_goals(num_draws, max_draws if is_enough else num_draws):
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


# Subsets of the examples for the gradient beyond second order. A LeNet-5 head (60,000 examples, prior precision 698): with
# 3/32 of them, 260 draws of 16 chains take 18 s on one thread instead of 37, and are as effective.
_SHARES = (1 / 64, 1 / 32, 3 / 64, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4)
_LARGEST_ERROR = 0.14  # of a kick, in posterior standard deviations: costs 5% of acceptance
# Of the whole gradient beyond second order: where it is larger, draws of the Gaussian do not tell how accurate a subset is
# along the chains.
_LARGEST_RESIDUAL = 2.0
_PILOT_DRAWS = 8
_LEAST_RATIO = 4  # examples by parameter: below it, products with the root of the covariance take the time
_LEAST_WORK = 1e7  # examples times parameters; below it, a run takes seconds


def choose_residual(
    target: LastLayerTarget, mode: Tensor, covariance: Covariance, generator: torch.Generator
) -> SubsetResidual | None:
    """Return the gradient beyond second order from the smallest subset of examples that is accurate enough.

    None if the target is small or far from Gaussian, as under weak priors, or a quarter of the examples is not enough.

    Args:
        mode: (P,).
        covariance: inverse of the whole Hessian there.
        generator: CPU generator of the draws that judge a subset, and of the subset.
    """
    num_examples, num_params = target.num_examples, target.layout.num_params
    if target.device.type != "cpu":  # unmeasured on GPUs, where launches of kernels take much of the time
        return None
    if num_examples < _LEAST_RATIO * num_params or num_examples * num_params < _LEAST_WORK:
        return None
    anchor, root = mode.to(target.device).double(), covariance.to(device=target.device)
    z = standard_normal(2 * _PILOT_DRAWS, num_params, generator, target.device)
    displacement = root.unwhiten(z).double()
    sizes = residual_sizes(target, anchor, displacement[:_PILOT_DRAWS])
    z, displacement = z[_PILOT_DRAWS:], displacement[_PILOT_DRAWS:]
    expected = root.pull_back(target.log_joint_and_grad(anchor + displacement)[1]) + z
    if not _rms_length(expected) <= _LARGEST_RESIDUAL:
        return None
    for share in _SHARES:
        found = SubsetResidual.draw(target, anchor, sizes, round(share * num_examples), generator)
        if _rms_length(root.pull_back(found(displacement)) - expected) <= _LARGEST_ERROR:
            return found
    return None


def _rms_length(rows: Tensor) -> float:
    return float(rows.square().sum(dim=1).mean().sqrt())


def _restore_state(
    resume: ResumeStore, kept: DrawRecorder, generator: torch.Generator, potential: WhitenedPotential
) -> SamplerState | None:
    """Restore the state of an unfinished run, with draws, generator and pivot; None if there is none."""
    stored = resume.restore()
    if stored is None:
        return None
    device = potential.target.device
    kept.restore(stored, device)
    generator.set_state(stored["generator"])
    if potential.pivot is not None:
        potential.pivot.copy_(stored["pivot"])
    return SamplerState.from_tensors(stored, device)


def draw_goals(num_draws: int, max_draws: int | None) -> Iterator[int]:
    """Yield the numbers of draws per chain at which to judge a run: num_draws, then steps of half that, up to max_draws."""
    largest = 20 * num_draws if max_draws is None else max_draws
    yield from itertools.takewhile(lambda goal: goal < largest, itertools.count(num_draws, max(1, num_draws // 2)))
    yield largest


class DrawRecorder:
    """The draws in their store, and a few numbers of each; not the states, which are many times larger."""

    def __init__(self, store: DrawStore) -> None:
        self.store = store
        self.numbers: list[tuple[Tensor, ...]] = []
        self.num_steps: list[int] = []

    @property
    def num_draws(self) -> int:
        """Draws per chain."""
        return len(self.num_steps)

    def add(self, theta: Tensor, log_joint: Tensor, result: Transition) -> None:
        """Add a draw of every chain, theta (C, P), with its log joint (C,)."""
        self.store.append(theta.float())
        self.numbers.append((log_joint, result.energy, result.acceptance, result.is_divergent))
        self.num_steps.append(result.num_steps)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the numbers, (C, T) each, and the steps (T,)."""
        stacked = [torch.stack(part, dim=1) for part in zip(*self.numbers, strict=True)]
        steps = {"num_steps": torch.tensor(self.num_steps, dtype=torch.int64)}
        return steps | dict(zip(_STATISTICS, stacked, strict=True) if stacked else ())

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Invert to_tensors; the draws are already in the store."""
        self.num_steps = tensors["num_steps"].tolist()
        if self.num_steps:
            self.numbers = list(zip(*(tensors[name].to(device).unbind(dim=1) for name in _STATISTICS), strict=True))

    def run(self, step_size: float) -> HmcRun:
        """Return the result, chain axis first. Raises NumericError if every chain diverged."""
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
    """All chains of a run: how they move, where they are, and their draws."""

    potential: WhitenedPotential
    settings: SamplerSettings
    mover: Mover | None
    complete: Completion | None
    generator: torch.Generator
    kept: DrawRecorder
    walk: SamplerState

    def advance(self) -> None:
        """Make one transition; after warm-up, keep one more draw of every chain."""
        self.walk, result = advance(
            self.potential, self.walk, self.settings, generator=self.generator, mover=self.mover
        )
        if self.walk.num_done > self.settings.num_warmup:
            self.kept.add(*self._whole(), result)

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Return all of theta (C, P) at the current state, and its log joint (C,)."""
        theta, log_joint = self.potential.theta(self.walk.state.z), -self.walk.state.potential
        if self.complete is None:
            return theta, log_joint
        whole, outside = self.complete(theta, self.generator)
        return whole, log_joint + outside

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that resuming needs."""
        pivot = {} if self.potential.pivot is None else {"pivot": self.potential.pivot}
        return {**self.walk.to_tensors(), **pivot, **self.kept.to_tensors(), "generator": self.generator.get_state()}
