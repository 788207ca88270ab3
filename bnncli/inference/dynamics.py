"""Hamiltonian dynamics of many chains in whitened coordinates: potential, trajectories, step-size adaptation, draw stores.

The split dynamics follow Shahbaba, Lan, Johnson and Neal (2014), arXiv:1106.5941: exact rotations under N(0, I), kicks
by the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from bnncli.lazy import torch
from bnncli.posteriors import move, standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance, Root
from bnncli.targets.target import LogJoint, WholeTarget
from bnncli.training.loop import StepGraph

if TYPE_CHECKING:
    from torch import Tensor


class DrawStore(Protocol):
    """Storage for draws as they are sampled."""

    def append(self, theta: Tensor) -> None:
        """Store one draw (C, P), float32, of every chain."""

    def draws(self) -> Tensor:
        """Return all draws, (C, T, P) float32 on the CPU."""


class MemoryDraws:
    """Draws in memory."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def append(self, theta: Tensor) -> None:
        """Store one draw (C, P) of every chain."""
        self._kept.append(theta)

    def draws(self) -> Tensor:
        """Return all draws, (C, T, P) on the CPU."""
        return torch.stack(self._kept, dim=1).cpu()


class DrawSubset:
    """A subset of each chain's draws in memory.

    Args:
        places: (T', C), indices of the draws to keep, ascending.
    """

    def __init__(self, places: Tensor) -> None:
        self._places, self._num_seen = places, 0
        self._kept: Tensor | None = None

    def append(self, theta: Tensor) -> None:
        """Store one draw (C, P) of the chains that keep it."""
        if self._kept is None:
            self._kept = theta.new_empty(theta.shape[0], len(self._places), theta.shape[1])
        turns, chains = (self._places == self._num_seen).nonzero(as_tuple=True)
        self._num_seen += 1
        turns, chains = turns.to(theta.device), chains.to(theta.device)
        self._kept[chains, turns] = theta.index_select(0, chains)

    def draws(self) -> Tensor:
        """Return the kept draws, (C, T', P) on the CPU."""
        assert self._kept is not None
        return self._kept.cpu()


class ResumeStore(Protocol):
    """Storage for the resume state of an unfinished run; the draw store holds the draws."""

    def restore(self) -> dict[str, Tensor] | None:
        """Return the state to continue from, with the draw store truncated to it; None to start over."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Store the state if it is due or the last chance; called after every transition."""


class NoResume:
    """A resume store that stores nothing."""

    def restore(self) -> None:
        """Start over."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class WhiteCoordinates:
    """Whitened coordinates z: theta = mean + L z.

    Args:
        mean: (P,).
        covariance: L L^T.
    """

    mean: Tensor
    covariance: Covariance

    @classmethod
    def of(cls, gaussian: Gaussian, device: torch.device | str, dtype: torch.dtype) -> WhiteCoordinates:
        """Build the coordinates of a Gaussian on a device and in a precision."""
        return cls(gaussian.mean.to(device, dtype), gaussian.covariance.to(device=device, dtype=dtype))

    def theta(self, z: Tensor) -> Tensor:
        """Return theta (S, P) at z (S, P)."""
        return self.mean + self.covariance.unwhiten(z)

    def z(self, theta: Tensor) -> Tensor:
        """Return z (S, P) at theta (S, P)."""
        return self.covariance.whiten(theta.to(self.mean) - self.mean)

    def products(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the function (M, P) -> (M, P) float64 that multiplies by L^T H L, given one that multiplies by H."""
        covariance = self.covariance

        def multiply(vectors: Tensor) -> Tensor:
            image = covariance.unwhiten(vectors.to(self.mean))
            return covariance.pull_back(product(image.double()).to(self.mean)).double()

        return multiply


@dataclass(frozen=True)
class WhitenedLogJoint:
    """A target, or a minibatch estimate of it, as a function of z, without the constant log|det L|."""

    joint: LogJoint
    coordinates: WhiteCoordinates

    def log_joint_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,) at mean + L z, nats, and its gradient in z (S, P), for z (S, P)."""
        log_joint, gradient = self.joint.log_joint_and_grad(self.coordinates.theta(z))
        return log_joint, self.coordinates.covariance.pull_back(gradient.to(self.coordinates.mean))


DYNAMICS = ("split", "leapfrog")
# Rotations by just over a quarter turn anticorrelate successive draws, which doubles the effective sample size of
# means. The jitter prevents periodic trajectories.
TURN = 0.55 * math.pi
JITTER = (0.8, 1.2)
LONGEST_TURN = TURN * JITTER[1]
MAX_STEPS = 128
DIVERGENCE = 1000.0  # nats of energy error, as in Stan
# of the potential, in units of sqrt(P): near N(0, I), the standard deviation of its difference between two draws
FALL = 5.0


class State(NamedTuple):
    """Chains at z (C, P), their potential energy (C,), nats, and its gradient (C, P); float64."""

    z: Tensor
    potential: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class WhitenedPotential:
    """Minus the log joint as a function of z, with theta = mode + L z.

    Args:
        target: the log posterior.
        mode: (P,), float64.
        covariance: L, by its products.
        coarse: cheaper gradient (C, P) at mode + displacement (C, P), used for kicks in place of the target's. Any kick
            that depends only on position keeps the trajectory reversible and volume-preserving, and the energy at its
            end, which decides on acceptance, is the target's.
        residual: cheaper gradient (C, P) at mode + displacement (C, P) of the log joint beyond second order, used for
            kicks with the gradient -z of the Gaussian; only for a covariance that is the inverse Hessian at the mode.
        pivot: centre of the rotations in the split dynamics, z (P,), float64; 0 by default. May be written between
            trajectories.
    """

    target: WholeTarget
    mode: Tensor
    covariance: Root
    coarse: Callable[[Tensor], Tensor] | None = None
    residual: Callable[[Tensor], Tensor] | None = None
    pivot: Tensor | None = None

    def theta(self, z: Tensor) -> Tensor:
        """Return theta (C, P) at z (C, P)."""
        return self.mode + self.covariance.unwhiten(z)

    def state(self, z: Tensor) -> State:
        """Return potential and gradient at z (C, P): one pass over the data, or two if the gradient is not the target's."""
        return self.with_energy(self.moving(z))

    def moving(self, z: Tensor) -> State:
        """Return the state within a trajectory; with a cheaper gradient the potential, which kicks do not need, is NaN."""
        displacement = self.covariance.unwhiten(z)
        if not self._moves_by_target:
            unknown = torch.full_like(z[:, 0], math.nan)
            if self.residual is not None:
                return State(z, unknown, z - self.covariance.pull_back(self.residual(displacement)).double())
            assert self.coarse is not None
            return State(z, unknown, -self.covariance.pull_back(self.coarse(displacement)).double())
        log_joint, gradient = self.target.log_joint_and_grad(self.mode + displacement)
        return State(z, -log_joint, -self.covariance.pull_back(gradient).double())

    def with_energy(self, state: State) -> State:
        """Return the state from `moving` with the target's own potential."""
        if self._moves_by_target:
            return state
        return state._replace(potential=-self.target.log_joint(self.theta(state.z)))

    @property
    def _moves_by_target(self) -> bool:
        return self.coarse is None and self.residual is None

    def offset(self, z: Tensor) -> Tensor:
        """Return the offset of z (C, P) from the pivot."""
        return z if self.pivot is None else z - self.pivot

    def at_offset(self, offset: Tensor) -> Tensor:
        """Invert `offset`."""
        return offset if self.pivot is None else self.pivot + offset


# Integrator stages as (kick, move, kick) shares of the step, one per gradient evaluation; kicks in the middle are in
# halves. Coefficients of Blanes, Casas and Sanz-Serna (2014), arXiv:1405.3153, equations (6.4) and (6.7). With three or
# more gradients the energy error at the end of a trajectory is about half of leapfrog's at equal cost (measured on
# heads of 850 and 7,700 parameters); with two it is about equal.
_TWO = (3 - math.sqrt(3)) / 6
_THREE, _MOVE_OF_THREE = 0.11888010966548, 0.29619504261126
_STAGES = {
    1: ((0.5, 1.0, 0.5),),
    2: ((_TWO, 0.5, 0.5 - _TWO), (0.5 - _TWO, 0.5, _TWO)),
    3: (
        (_THREE, _MOVE_OF_THREE, 0.25 - _THREE / 2),
        (0.25 - _THREE / 2, 1 - 2 * _MOVE_OF_THREE, 0.25 - _THREE / 2),
        (0.25 - _THREE / 2, _MOVE_OF_THREE, _THREE),
    ),
}


class StepFactors(NamedTuple):
    """Factors of one stage of an integrator step: numbers, or () float64 on the device.

    Args:
        before, after: factors of the force in the two kicks.
        whole: length of the move.
        cosine, sine: of that length as an angle.
    """

    before: float | Tensor
    after: float | Tensor
    whole: float | Tensor
    cosine: float | Tensor
    sine: float | Tensor


def num_trajectory_gradients(
    length: float, step_size: float, *, dynamics: str, least: int = 1, most: int = MAX_STEPS
) -> int:
    """Return the number of gradients for a trajectory of this length at steps of at most step_size each.

    The number is a whole number of steps of `parts`.
    """
    count = max(least, math.ceil(length / step_size - 1e-9))
    return min(most, count + (dynamics == "split" and count > 3 and count % 2))


def trajectory_stages(num_steps: int, step_size: float, *, dynamics: str) -> list[StepFactors]:
    """Return the stages of a trajectory with num_steps gradients, step_size each.

    The reversed list with exchanged kicks is the way back. split: two-stage steps, or one three-stage step for three
    gradients. leapfrog: one-stage steps, as a control.
    """
    stages = 1 if dynamics == "leapfrog" else 3 if num_steps == 3 else 2 - num_steps % 2
    found, size = [], stages * step_size
    for before, share, after in _STAGES[stages]:
        angle = share * size
        found.append(StepFactors(before * size, after * size, angle, math.cos(angle), math.sin(angle)))
    return found * (num_steps // stages)


def integrate(
    potential: WhitenedPotential, state: State, momentum: Tensor, factors: StepFactors, *, is_split: bool
) -> tuple[State, Tensor]:
    """Return the chains and momenta (C, P) after one stage: a kick, a rotation or straight move, a kick."""
    if not is_split:
        momentum = momentum - factors.before * state.gradient
        state = potential.moving(state.z + factors.whole * momentum)
        return state, momentum - factors.after * state.gradient
    offset = potential.offset(state.z)
    momentum = momentum - factors.before * (state.gradient - offset)
    turned = factors.cosine * offset + factors.sine * momentum
    momentum = factors.cosine * momentum - factors.sine * offset
    state = potential.moving(potential.at_offset(turned))
    return state, momentum - factors.after * (state.gradient - turned)


def trajectory(
    potential: WhitenedPotential,
    state: State,
    momentum: Tensor,
    *,
    step_size: float,
    num_steps: int,
    dynamics: str,
) -> tuple[State, Tensor]:
    """Return the chains, with energy as in `moving`, and momenta (C, P) after num_steps gradients, step_size each.

    Reversible and volume-preserving. split: kicks by the gradient of potential - |z - pivot|^2 / 2, with rotations of
    (z - pivot, momentum) between them. leapfrog: half a kick by the gradient of the potential, a straight move, half a
    kick.
    """
    for factors in trajectory_stages(num_steps, step_size, dynamics=dynamics):
        state, momentum = integrate(potential, state, momentum, factors, is_split=dynamics == "split")
    return state, momentum


class Mover(Protocol):
    """Computes trajectories as `trajectory` does, for its own potential and dynamics."""

    has_energy: ClassVar[bool]
    """Whether returned chains have the target's own potential, as from `WhitenedPotential.with_energy`."""

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """Return the chains and momenta (C, P) after num_steps gradients; the next call may overwrite them."""


@dataclass(frozen=True)
class PlainMover:
    """Computes `trajectory` for a potential and dynamics."""

    has_energy: ClassVar[bool] = False
    potential: WhitenedPotential
    dynamics: str

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """Return the chains and momenta (C, P) after num_steps gradients."""
        return trajectory(
            self.potential, state, momentum, step_size=step_size, num_steps=num_steps, dynamics=self.dynamics
        )


class Transition(NamedTuple):
    """One transition of all chains.

    is_falling (C,) marks chains far above the posterior's energies, which move down regardless of the energy error.
    """

    state: State
    energy: Tensor
    acceptance: Tensor
    is_divergent: Tensor
    num_steps: int
    is_falling: Tensor | None = None


def transition(
    potential: WhitenedPotential,
    state: State,
    generator: torch.Generator,
    step_size: float,
    dynamics: str,
    *,
    max_steps: int = MAX_STEPS,
    is_settling: bool = False,
    mover: Mover | None = None,
) -> Transition:
    """Draw new momenta, follow a trajectory of jittered length, and accept each chain by its exact energy.

    Args:
        generator: CPU generator of momenta, lengths and acceptances; its state is stored for resuming.
        step_size: upper limit; the steps divide the trajectory evenly.
        is_settling: the chains may not have reached the posterior yet. Those whose potential falls by FALL move
            regardless of the energy error, which would otherwise require tiny steps.
        mover: for the same potential and dynamics; `trajectory` by default.
    """
    num_chains, dim = state.z.shape
    momentum = standard_normal(num_chains, dim, generator, state.z.device)
    unit = torch.rand(num_chains + 1, generator=generator, device=generator.device, dtype=torch.float64)
    length = TURN * (JITTER[0] + (JITTER[1] - JITTER[0]) * float(unit[0]))
    least = 1 if potential.residual is None else 2  # the energy takes longer than a second gradient
    num_steps = num_trajectory_gradients(length, step_size, dynamics=dynamics, least=least, most=max_steps)
    mover = mover or PlainMover(potential, dynamics)
    proposal, new_momentum = mover(state, momentum, step_size=min(length / num_steps, step_size), num_steps=num_steps)
    if not mover.has_energy:
        proposal = potential.with_energy(proposal)
    energy = state.potential + 0.5 * momentum.square().sum(dim=1)
    new_energy = proposal.potential + 0.5 * new_momentum.square().sum(dim=1)
    error = (new_energy - energy).nan_to_num(nan=math.inf)
    acceptance = torch.exp(-error.clamp(min=0))
    is_accepted = move(unit[1:], acceptance.device) < acceptance
    is_falling = None
    if is_settling:
        is_falling = state.potential - proposal.potential > FALL * math.sqrt(dim)
        is_accepted = is_accepted | is_falling
    return Transition(
        State(*(_choose(is_accepted, new, old) for new, old in zip(proposal, state, strict=True))),
        torch.where(is_accepted, new_energy, energy),
        acceptance,
        error > DIVERGENCE,
        num_steps,
        is_falling,
    )


def _choose(is_accepted: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(is_accepted.view(-1, *[1] * (new.ndim - 1)), new, old)


class _Phase:
    """Chains and momenta updated in place. It holds no reference to the graph, so both are freed together.

    Args:
        potential: their potential.
        state, momentum: templates of shape and precision.
        is_split: whether the dynamics are split.
    """

    def __init__(self, potential: WhitenedPotential, state: State, momentum: Tensor, *, is_split: bool) -> None:
        self.potential, self.is_split = potential, is_split
        self.state, self.momentum = State(*(torch.empty_like(part) for part in state)), torch.empty_like(momentum)
        self.numbers = torch.zeros(len(StepFactors._fields), dtype=torch.float64, device=momentum.device).unbind()
        self._written: tuple[float | Tensor, ...] = (0.0,) * len(self.numbers)
        self.count = torch.zeros((), dtype=torch.int64, device=momentum.device)

    def write(self, state: State, momentum: Tensor) -> None:
        """Set the start of a trajectory."""
        for own, given in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(given)

    def set(self, factors: StepFactors) -> None:
        """Set the factors of the next stage; fill kernels carry changed numbers to the device without a sync."""
        for place, number, old in zip(self.numbers, factors, self._written, strict=True):
            if number != old:
                place.fill_(number)
        self._written = tuple(factors)

    def step(self) -> None:
        """Apply one stage and count it."""
        state, momentum = integrate(
            self.potential, self.state, self.momentum, StepFactors(*self.numbers), is_split=self.is_split
        )
        for own, new in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(new)
        self.count += 1

    def num_done(self) -> int:
        """Return the number of stages counted on the device."""
        return int(self.count)


class GraphMover:
    """Computes trajectories as `trajectory` does with a CUDA graph; each call overwrites the result of the previous one.

    Args:
        potential: its target is resident on the GPU.
        dynamics: split or leapfrog.
        warn: called once if the step cannot be captured.
    """

    has_energy: ClassVar[bool] = False

    def __init__(self, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]) -> None:
        self.potential, self.dynamics, self.warn = potential, dynamics, warn
        self._moving: tuple[_Phase, StepGraph[None]] | None = None

    @classmethod
    def where_possible(
        cls, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]
    ) -> GraphMover | None:
        """Return a mover for these trajectories; None on a CPU, or if data are copied to the GPU in blocks."""
        target = potential.target
        return cls(potential, dynamics, warn=warn) if target.device.type == "cuda" and target.is_resident else None

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """Return the chains and momenta (C, P) after num_steps gradients.

        Raises:
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        if self._moving is None:
            phase = _Phase(self.potential, state, momentum, is_split=self.dynamics == "split")
            self._moving = phase, StepGraph(phase.step, phase.num_done, momentum.device, warn=self.warn)
        phase, step = self._moving
        phase.write(state, momentum)
        for factors in trajectory_stages(num_steps, step_size, dynamics=self.dynamics):
            phase.set(factors)
            step()
        return phase.state, phase.momentum


def mean_of_chains(z: Tensor, gradient: Tensor) -> Tensor:
    """Estimate the mean (P,) of the distribution of chains at z (C, P) whose potential has this gradient (C, P).

    The gradient has mean 0 (Stein 1972), so z - gradient has the mean of z; near N(0, I) it hardly varies. Each
    coordinate uses whichever of the two varies less between chains. The result is shrunk towards 0 by its noise
    (positive-part James and Stein 1961), so one chain, or widely scattered chains, give 0.
    """
    num_chains = len(z)
    if num_chains == 1:
        return z.new_zeros(z.shape[1])
    explained = z - gradient
    is_steadier = explained.var(dim=0) < z.var(dim=0)
    values = explained.where(is_steadier, z)
    mean = values.mean(dim=0)
    noise = values.var(dim=0).sum() / num_chains
    return mean * (1 - noise / mean.square().sum()).clamp(min=0).nan_to_num(nan=0.0)


STUCK_SHARE = 0.25


def adaptation_statistic(
    smoothed: Tensor, acceptance: Tensor, target_accept: float, is_falling: Tensor | None = None
) -> float | None:
    """Return the acceptance rate for dual averaging: the mean, unless a chain is stuck; None while a chain falls.

    The mean hides one stuck chain. If a chain's recent rate is below a quarter of the goal, the harmonic mean of the
    recent rates replaces it, which one chain near zero pulls to zero (Hoffman, Radul and Sountsov 2021 use it
    throughout).

    Args:
        smoothed: (C,), recent acceptance rate of each chain.
        acceptance: (C,), of the last transition.
        target_accept: the goal.
        is_falling: (C,); falling chains need other steps than those that have settled.
    """
    harmonic = 1 / (1 / smoothed.clamp(min=1e-3)).mean()
    fallen = torch.zeros_like(harmonic) if is_falling is None else is_falling.any().to(harmonic)
    numbers = torch.stack([smoothed.min(), acceptance.mean(), harmonic, fallen])
    lowest, mean, harmonic_mean, has_fallen = numbers.tolist()  # one sync
    if has_fallen:
        return None
    return float(mean if lowest >= STUCK_SHARE * target_accept else harmonic_mean)


class StepSizeAdaptation(NamedTuple):
    """Dual averaging of a step size: algorithm 5 of Hoffman and Gelman (2014), with their constants."""

    goal: float
    shrinkage_point: float
    largest: float
    num_updates: int
    error_sum: float
    log_current: float
    log_average: float

    @classmethod
    def start(cls, *, initial: float, target_accept: float) -> StepSizeAdaptation:
        """Start the adaptation. The largest step covers the longest trajectory in one step."""
        largest = math.log(LONGEST_TURN)
        return cls(target_accept, math.log(10 * initial), largest, 0, 0.0, math.log(initial), math.log(initial))

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> StepSizeAdaptation:
        """Invert to_tensor."""
        goal, shrinkage_point, largest, num_updates, *rest = numbers.tolist()
        return cls(goal, shrinkage_point, largest, round(num_updates), *rest)

    def to_tensor(self) -> Tensor:
        """Return all fields as a float64 tensor."""
        return torch.tensor(self, dtype=torch.float64)

    @property
    def current(self) -> float:
        """Step size of the next transition."""
        return math.exp(self.log_current)

    @property
    def final(self) -> float:
        """Averaged step size, for sampling."""
        return math.exp(min(self.log_average, self.largest))

    def update(self, acceptance: float) -> StepSizeAdaptation:
        """Update with the mean acceptance over the chains of one transition."""
        count = self.num_updates + 1
        weight = 1 / (count + 10)
        error_sum = (1 - weight) * self.error_sum + weight * (self.goal - acceptance)
        log_current = min(self.shrinkage_point - math.sqrt(count) / 0.05 * error_sum, self.largest)
        decay = count**-0.75
        log_average = decay * log_current + (1 - decay) * self.log_average
        return self._replace(num_updates=count, error_sum=error_sum, log_current=log_current, log_average=log_average)
