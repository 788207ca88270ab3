"""Hamiltonian Monte Carlo on a log posterior, all chains at once, in coordinates whitened by a Gaussian.

With theta = mode + L z the posterior is near N(0, I). The default dynamics split the Hamiltonian into that Gaussian,
whose motion is an exact rotation, and the rest, which kicks; plain leapfrog is the control. One step size for all
chains. A run can be stored between any two transitions and continued to the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from bnncli.covariances import Covariance, root_for_many
from bnncli.errors import Interrupted, NumericError
from bnncli.inference.chain_groups import Workers
from bnncli.inference.draw_stores import DrawStore, MemoryDraws, NoResume, ResumeStore
from bnncli.inference.dynamics import DYNAMICS, Mover, Transition, WhitenedPotential
from bnncli.inference.trajectory_graph import GraphMover
from bnncli.inference.walk import SamplerSettings, Walk, advance
from bnncli.lazy import torch
from bnncli.posteriors import standard_normal
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import WholeTarget

if TYPE_CHECKING:
    from torch import Tensor

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
