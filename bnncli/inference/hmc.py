"""Hamiltonian Monte Carlo on the last-layer posterior, all chains at once, in coordinates whitened by a Gaussian.

With theta = mode + L z the posterior is near N(0, I). The default dynamics split the Hamiltonian into that Gaussian,
whose motion is an exact rotation, and the rest, which kicks (Shahbaba, Lan, Johnson, Neal 2014, arXiv:1106.5941,
section 3.1); plain leapfrog is the control. One step size for all chains by dual averaging (Hoffman and Gelman 2014,
arXiv:1111.4246, algorithm 5). Neal (2011), arXiv:1206.1901, for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bnncli.covariances import Covariance
from bnncli.errors import NumericError
from bnncli.inference.dynamics import DYNAMICS, State, WhitenedPotential, trajectory
from bnncli.posteriors import standard_normal
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget

# A quarter turn of the Gaussian forgets the start; the jitter keeps trajectories from closing on themselves.
QUARTER_TURN = 0.5 * math.pi
JITTER = (0.8, 1.2)
MAX_STEPS = 128
# The first part of the warm-up only brings the chains from their over-dispersed starts to where the posterior is.
SETTLING_SHARE = 0.4
SETTLING_STEPS = 16
STUCK_SHARE = 0.25
DIVERGENCE = 1000.0  # nats of energy error, as in Stan
_OVERDISPERSION = 2.0  # standard deviation of the starts, in posterior standard deviations


@dataclass(frozen=True)
class HmcRun:
    """What a sampler returns.

    Args:
        draws: (C, T, P), float32.
        log_joint: (C, T), float64, nats.
        energy: (C, T), of each kept state, nats; None where the sampler does not tell.
        acceptance_rate: (C, T), in [0, 1].
        diverging: (C, T), whether the trajectory's energy error was above 1000 nats or not finite.
        step_size: after warm-up, in posterior standard deviations.
        n_steps: (C, T), gradient evaluations of each trajectory.
    """

    draws: Tensor
    log_joint: Tensor
    energy: Tensor | None
    acceptance_rate: Tensor
    diverging: Tensor
    step_size: float
    n_steps: Tensor


def sample_hmc(
    target: LastLayerTarget,
    *,
    mode: Tensor,
    covariance: Covariance,
    generator: torch.Generator,
    num_chains: int = 16,
    num_warmup: int = 60,
    num_draws: int = 160,
    target_accept: float = 0.8,
    dynamics: str = "split",
    progress: Progress = SILENT,
) -> HmcRun:
    """Draws from target, num_chains * num_draws of them after warm-up.

    Args:
        target: the log posterior, with all data.
        mode: (P,), the mode or a point near it.
        covariance: of a Gaussian there; any gives the right distribution, a good one gives it soon.
        generator: of starts, momenta, trajectory lengths and acceptances.
        num_chains: all in one matrix product, started from N(mode, 2^2 Sigma).
        num_warmup: transitions a chain makes first, in which the step size is found.
        num_draws: transitions kept, a chain.
        target_accept: acceptance rate that the step size aims for.
        dynamics: split or leapfrog.
        progress: advanced once a transition.

    Raises:
        NumericError: when all chains diverge after warm-up.
    """
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics: expected one of {', '.join(DYNAMICS)}; got {dynamics!r}")
    potential = WhitenedPotential(target, mode.to(target.device).double(), covariance.to(device=target.device))
    start = _OVERDISPERSION * standard_normal(num_chains, mode.shape[0], generator, target.device)
    state = potential.state(start)
    task = progress.task(f"hmc, {num_chains} chains", num_warmup + num_draws)
    adaptation = StepSizeAdaptation.start(initial=QUARTER_TURN / 4, target_accept=target_accept)
    smoothed = torch.full((num_chains,), target_accept, dtype=torch.float64, device=state.z.device)
    settling = math.ceil(SETTLING_SHARE * num_warmup)
    for iteration in range(num_warmup):
        if iteration == settling:  # the steps that freed stuck chains say nothing about the steps to sample with
            adaptation = StepSizeAdaptation.start(initial=QUARTER_TURN / 4, target_accept=target_accept)
        max_steps = SETTLING_STEPS if iteration < settling else MAX_STEPS
        result = transition(potential, state, generator, adaptation.current, dynamics, max_steps=max_steps)
        state = result.state
        smoothed = 0.7 * smoothed + 0.3 * result.acceptance
        adaptation = adaptation.update(adaptation_statistic(smoothed, result.acceptance, target_accept))
        task.advance(note=f"step size {adaptation.current:.2f}")
    kept = Kept(torch.empty(num_chains, num_draws, mode.shape[0], device=state.z.device))
    for _ in range(num_draws):
        result = transition(potential, state, generator, adaptation.final, dynamics)
        state = result.state
        kept.add(potential.theta(state.z), result)
        task.advance(note=f"step size {adaptation.final:.2f}")
    return kept.run(adaptation.final)


def adaptation_statistic(smoothed: Tensor, acceptance: Tensor, target_accept: float) -> float:
    """What dual averaging compares with its goal: the mean acceptance, unless a chain is stuck.

    The mean hides one stuck chain behind the others. When the recent rate of a chain is below a quarter of the goal, it
    is the harmonic mean of the chains' recent rates, which one chain near zero pulls to zero (Hoffman, Radul and
    Sountsov 2021, AISTATS, use it throughout).

    Args:
        smoothed: (C,), each chain's recent acceptance rate.
        acceptance: (C,), of the last transition.
        target_accept: the goal.
    """
    if float(smoothed.min()) >= STUCK_SHARE * target_accept:
        return float(acceptance.mean())
    return float(1 / (1 / smoothed.clamp(min=1e-3)).mean())


class Transition(NamedTuple):
    """One step of all chains."""

    state: State
    energy: Tensor
    acceptance: Tensor
    is_divergent: Tensor
    num_steps: int


def transition(
    potential: WhitenedPotential,
    state: State,
    generator: torch.Generator,
    step_size: float,
    dynamics: str,
    *,
    max_steps: int = MAX_STEPS,
) -> Transition:
    """New momenta, a trajectory of jittered length, and each chain's acceptance by the exact energy."""
    num_chains, dim = state.z.shape
    momentum = standard_normal(num_chains, dim, generator, state.z.device)
    unit = torch.rand(num_chains + 1, generator=generator, device=generator.device, dtype=torch.float64)
    length = QUARTER_TURN * (JITTER[0] + (JITTER[1] - JITTER[0]) * float(unit[0]))
    num_steps = min(max_steps, max(1, math.ceil(length / step_size - 1e-9)))
    proposal, new_momentum = trajectory(
        potential, state, momentum, step_size=min(length / num_steps, step_size), num_steps=num_steps, dynamics=dynamics
    )
    energy = state.potential + 0.5 * momentum.square().sum(dim=1)
    new_energy = proposal.potential + 0.5 * new_momentum.square().sum(dim=1)
    error = (new_energy - energy).nan_to_num(nan=math.inf)
    acceptance = torch.exp(-error.clamp(min=0))
    is_accepted = unit[1:].to(acceptance.device) < acceptance
    return Transition(
        State(*(_choose(is_accepted, new, old) for new, old in zip(proposal, state, strict=True))),
        torch.where(is_accepted, new_energy, energy),
        acceptance,
        error > DIVERGENCE,
        num_steps,
    )


class StepSizeAdaptation(NamedTuple):
    """Dual averaging of one step size, algorithm 5 of Hoffman and Gelman, with their constants."""

    goal: float
    shrinkage_point: float
    largest: float
    num_updates: int
    error_sum: float
    log_current: float
    log_average: float

    @classmethod
    def start(cls, *, initial: float, target_accept: float) -> StepSizeAdaptation:
        """Before the first transition. The largest step is one that makes the longest trajectory in one."""
        largest = math.log(QUARTER_TURN * JITTER[1])
        return cls(target_accept, math.log(10 * initial), largest, 0, 0.0, math.log(initial), math.log(initial))

    @property
    def current(self) -> float:
        """The step size to try next."""
        return math.exp(self.log_current)

    @property
    def final(self) -> float:
        """The averaged step size, for sampling."""
        return math.exp(min(self.log_average, self.largest))

    def update(self, acceptance: float) -> StepSizeAdaptation:
        """After a transition with this mean acceptance over the chains."""
        count = self.num_updates + 1
        weight = 1 / (count + 10)
        error_sum = (1 - weight) * self.error_sum + weight * (self.goal - acceptance)
        log_current = min(self.shrinkage_point - math.sqrt(count) / 0.05 * error_sum, self.largest)
        decay = count**-0.75
        log_average = decay * log_current + (1 - decay) * self.log_average
        return self._replace(num_updates=count, error_sum=error_sum, log_current=log_current, log_average=log_average)


def _choose(is_accepted: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(is_accepted.view(-1, *[1] * (new.ndim - 1)), new, old)


class Kept:
    """The draws (C, T, P) as they come, and a few numbers of each; not the states, which are many times larger."""

    def __init__(self, draws: Tensor) -> None:
        self.draws = draws
        self.numbers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.num_steps: list[int] = []

    def add(self, theta: Tensor, result: Transition) -> None:
        """One more draw of every chain, theta (C, P)."""
        self.draws[:, len(self.num_steps)] = theta.float()
        self.numbers.append((-result.state.potential, result.energy, result.acceptance, result.is_divergent))
        self.num_steps.append(result.num_steps)

    def run(self, step_size: float) -> HmcRun:
        """All of it, chain axis first. Raises NumericError when every chain diverges."""
        log_joint, energy, acceptance, diverging = (
            torch.stack(part, dim=1) for part in zip(*self.numbers, strict=True)
        )
        if diverging.all(dim=1).all():
            raise NumericError(
                "every trajectory of every chain diverged after warm-up",
                hint="use more --warmup, or a larger --prior-precision",
            )
        num_steps = torch.tensor(self.num_steps).repeat(diverging.shape[0], 1)
        return HmcRun(self.draws, log_joint, energy, acceptance, diverging, step_size, num_steps)
