"""Hamiltonian motion of many chains in whitened coordinates: potential, trajectories, step size, and where draws are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from bnncli.covariances import Covariance, Root
from bnncli.lazy import torch
from bnncli.posteriors import move, standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.target import LogJoint, WholeTarget
from bnncli.training.loop import StepGraph

if TYPE_CHECKING:
    from torch import Tensor


class DrawStore(Protocol):
    """Where draws go as they come."""

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P), float32, of every chain."""

    def draws(self) -> Tensor:
        """All of them, (C, T, P) float32 on the CPU."""


class MemoryDraws:
    """Draws kept in memory."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain."""
        self._kept.append(theta)

    def draws(self) -> Tensor:
        """All of them, (C, T, P) on the CPU."""
        return torch.stack(self._kept, dim=1).cpu()


class SomeDraws:
    """Some draws of each chain kept in memory.

    Args:
        places: (T', C), which of its draws, in rising order.
    """

    def __init__(self, places: Tensor) -> None:
        self._places, self._num_seen = places, 0
        self._kept: Tensor | None = None

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of the chains whose turn it is."""
        if self._kept is None:
            self._kept = theta.new_empty(theta.shape[0], len(self._places), theta.shape[1])
        turns, chains = (self._places == self._num_seen).nonzero(as_tuple=True)
        self._num_seen += 1
        turns, chains = turns.to(theta.device), chains.to(theta.device)
        self._kept[chains, turns] = theta.index_select(0, chains)

    def draws(self) -> Tensor:
        """All of them, (C, T', P) on the CPU."""
        assert self._kept is not None
        return self._kept.cpu()


class ResumeStore(Protocol):
    """Where the resume states of an unfinished run are kept; the draws are the store's."""

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, the store cut to its draws; None to start afresh."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Called after every transition: store the state if it is time, or the last chance to."""


class NoResume:
    """Keeps nothing."""

    def restore(self) -> None:
        """Start afresh."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class WhiteCoordinates:
    """theta = mean + L z.

    Args:
        mean: (P,).
        covariance: L L^T.
    """

    mean: Tensor
    covariance: Covariance

    @classmethod
    def of(cls, gaussian: Gaussian, device: torch.device | str, dtype: torch.dtype) -> WhiteCoordinates:
        """The Gaussian's, elsewhere and in another precision."""
        return cls(gaussian.mean.to(device, dtype), gaussian.covariance.to(device=device, dtype=dtype))

    def theta(self, z: Tensor) -> Tensor:
        """theta (S, P) at z (S, P)."""
        return self.mean + self.covariance.unwhiten(z)

    def z(self, theta: Tensor) -> Tensor:
        """z (S, P) of theta (S, P)."""
        return self.covariance.whiten(theta.to(self.mean) - self.mean)

    def products(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The function (M, P) -> (M, P) float64 that multiplies by L^T H L, of one that multiplies by H."""
        covariance = self.covariance

        def multiply(vectors: Tensor) -> Tensor:
            image = covariance.unwhiten(vectors.to(self.mean))
            return covariance.pull_back(product(image.double()).to(self.mean)).double()

        return multiply


@dataclass(frozen=True)
class WhitenedLogJoint:
    """A target, or what a minibatch tells of it, as a function of z, without the constant log|det L|."""

    joint: LogJoint
    coordinates: WhiteCoordinates

    def log_joint_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,) at mean + L z, nats, and its gradient in z (S, P), for z (S, P)."""
        log_joint, gradient = self.joint.log_joint_and_grad(self.coordinates.theta(z))
        return log_joint, self.coordinates.covariance.pull_back(gradient.to(self.coordinates.mean))


DYNAMICS = ("split", "leapfrog")
# Turns of the Gaussian just above a quarter land opposite the start more often than not, which doubles the effective
# sample size of means; the jitter keeps trajectories from closing on themselves.
TURN = 0.55 * math.pi
JITTER = (0.8, 1.2)
LONGEST_TURN = TURN * JITTER[1]
MAX_STEPS = 128
DIVERGENCE = 1000.0  # nats of energy error, as in Stan
FALL = 5.0  # of the potential, in units of sqrt(P): the standard deviation, near N(0, I), of its difference between two draws


class State(NamedTuple):
    """Chains at z (C, P), with potential energy (C,) nats and its gradient (C, P) there; float64."""

    z: Tensor
    potential: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class WhitenedPotential:
    """-log_joint as a function of z, theta = mode + L z.

    Args:
        target: the log posterior.
        mode: (P,), float64.
        covariance: L, by its products.
        coarse: the gradient that kicks where it is not the target's own, (C, P) at mode + displacement (C, P). A trajectory
            needs only that: whatever function of position kicks, it is reversible and preserves volume, and the energy at
            its end, which decides about it, is the target's.
        pivot: what the Gaussian of the split dynamics turns about, z (P,), float64; 0 by default. It may be written while nothing moves.
    """

    target: WholeTarget
    mode: Tensor
    covariance: Root
    coarse: Callable[[Tensor], Tensor] | None = None
    pivot: Tensor | None = None

    def theta(self, z: Tensor) -> Tensor:
        """theta (C, P) at z (C, P)."""
        return self.mode + self.covariance.unwhiten(z)

    def state(self, z: Tensor) -> State:
        """Potential and gradient at z (C, P): one pass over the data, or one for each where the gradient is coarse."""
        return self.with_energy(self.moving(z))

    def moving(self, z: Tensor) -> State:
        """The same within a trajectory: the potential, which no kick needs, is NaN where the gradient is coarse."""
        displacement = self.covariance.unwhiten(z)
        if self.coarse is not None:
            unknown = torch.full_like(z[:, 0], math.nan)
            return State(z, unknown, -self.covariance.pull_back(self.coarse(displacement)).double())
        log_joint, gradient = self.target.log_joint_and_grad(self.mode + displacement)
        return State(z, -log_joint, -self.covariance.pull_back(gradient).double())

    def with_energy(self, state: State) -> State:
        """What `moving` gave, with the target's own potential."""
        if self.coarse is None:
            return state
        return state._replace(potential=-self.target.log_joint(self.theta(state.z)))

    def offset(self, z: Tensor) -> Tensor:
        """How far z (C, P) is from the pivot."""
        return z if self.pivot is None else z - self.pivot

    def at_offset(self, offset: Tensor) -> Tensor:
        """The inverse of `offset`."""
        return offset if self.pivot is None else self.pivot + offset


# Parts of a step: a kick, a move, a kick, as shares of the step, for each gradient that it takes. Kicks in the middle are in halves.
# Coefficients of Blanes, Casas and Sanz-Serna, equations (6.4) and (6.7); of three gradients and more the energy errors at the end of a
# trajectory are about half of leapfrog's at as many (measured: heads of 850 and 7,700 parameters), of two about the same.
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
    """What one part of an integrator step multiplies by: numbers, or () float64 each on the device.

    Args:
        before, after: what the kicks take of the force.
        whole: how long the move is.
        cosine, sine: of that as an angle.
    """

    before: float | Tensor
    after: float | Tensor
    whole: float | Tensor
    cosine: float | Tensor
    sine: float | Tensor


def num_gradients_of(length: float, step_size: float, *, dynamics: str, most: int = MAX_STEPS) -> int:
    """Gradients that a trajectory of that length takes at steps of at most step_size each; a whole number of steps of `parts`."""
    count = max(1, math.ceil(length / step_size - 1e-9))
    return min(most, count + (dynamics == "split" and count > 3 and count % 2))


def parts(num_steps: int, step_size: float, *, dynamics: str) -> list[StepFactors]:
    """The parts of a trajectory of so many gradients, step_size each: the same list backwards, with kicks exchanged, is the way back.

    split: steps of two stages, or of three where three gradients are all. leapfrog: of one, the control.
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
    """The chains and their momenta (C, P) one part of a step later: a kick, a rotation or a straight move, a kick."""
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
    """The chains, their energy as `moving` has it, and their momenta (C, P) after num_steps gradients, step_size each.

    Reversible and volume-preserving.
    split: kicks by the gradient of potential - |z - pivot|^2 / 2, rotations of (z - pivot, momentum) between them.
    leapfrog: half a kick by the gradient of the potential, a straight move, half a kick.
    """
    for factors in parts(num_steps, step_size, dynamics=dynamics):
        state, momentum = integrate(potential, state, momentum, factors, is_split=dynamics == "split")
    return state, momentum


class Mover(Protocol):
    """What makes trajectories as `trajectory` does, of a potential and dynamics of its own."""

    has_energy: ClassVar[bool]
    """Whether the chains come with the target's own potential, as `WhitenedPotential.with_energy` has it."""

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients; the next call may overwrite them."""


@dataclass(frozen=True)
class PlainMover:
    """`trajectory` of a potential and dynamics."""

    has_energy: ClassVar[bool] = False
    potential: WhitenedPotential
    dynamics: str

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients."""
        return trajectory(
            self.potential, state, momentum, step_size=step_size, num_steps=num_steps, dynamics=self.dynamics
        )


class Transition(NamedTuple):
    """One step of all chains; is_falling (C,): far above the posterior's energies, and moved down whatever the energy error."""

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
    """New momenta, a trajectory of jittered length, and each chain's acceptance by the exact energy.

    Args:
        generator: of momenta, length and acceptances, on the CPU; its state is all there is to store of them.
        step_size: the largest allowed; the steps divide the trajectory evenly.
        is_settling: chains need not be in the posterior yet: those whose potential falls by FALL move, as short as their trajectories
            would have to be for the exact energy.
        mover: of the same potential and dynamics; `trajectory` by default.
    """
    num_chains, dim = state.z.shape
    momentum = standard_normal(num_chains, dim, generator, state.z.device)
    unit = torch.rand(num_chains + 1, generator=generator, device=generator.device, dtype=torch.float64)
    length = TURN * (JITTER[0] + (JITTER[1] - JITTER[0]) * float(unit[0]))
    num_steps = num_gradients_of(length, step_size, dynamics=dynamics, most=max_steps)
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
    """Chains and momenta that move where they are; knows nothing of the graph, so that both go when they are let go.

    Args:
        potential: that they move in.
        state, momentum: of their shapes and precisions.
        is_split: which dynamics.
    """

    def __init__(self, potential: WhitenedPotential, state: State, momentum: Tensor, *, is_split: bool) -> None:
        self.potential, self.is_split = potential, is_split
        self.state, self.momentum = State(*(torch.empty_like(part) for part in state)), torch.empty_like(momentum)
        self.numbers = torch.zeros(len(StepFactors._fields), dtype=torch.float64, device=momentum.device).unbind()
        self._written: tuple[float | Tensor, ...] = (0.0,) * len(self.numbers)
        self.count = torch.zeros((), dtype=torch.int64, device=momentum.device)

    def write(self, state: State, momentum: Tensor) -> None:
        """Where a trajectory starts."""
        for own, given in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(given)

    def set(self, factors: StepFactors) -> None:
        """How the next part goes: numbers that are others than before reach the device with their kernels, without a wait."""
        for place, number, old in zip(self.numbers, factors, self._written, strict=True):
            if number != old:
                place.fill_(number)
        self._written = tuple(factors)

    def step(self) -> None:
        """One part of an integrator step, which is counted."""
        state, momentum = integrate(
            self.potential, self.state, self.momentum, StepFactors(*self.numbers), is_split=self.is_split
        )
        for own, new in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(new)
        self.count += 1

    def num_done(self) -> int:
        """Steps counted on the device."""
        return int(self.count)


class GraphMover:
    """Makes trajectories as `trajectory` does; what it returns, its next call overwrites.

    Args:
        potential: whose target is resident on its GPU.
        dynamics: split or leapfrog.
        warn: told once where the step cannot be captured.
    """

    has_energy: ClassVar[bool] = False

    def __init__(self, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]) -> None:
        self.potential, self.dynamics, self.warn = potential, dynamics, warn
        self._moving: tuple[_Phase, StepGraph[None]] | None = None

    @classmethod
    def where_possible(
        cls, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]
    ) -> GraphMover | None:
        """One for these trajectories; None on a CPU, and where data travel to the GPU block by block."""
        target = potential.target
        return cls(potential, dynamics, warn=warn) if target.device.type == "cuda" and target.is_resident else None

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients.

        Raises:
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        if self._moving is None:
            phase = _Phase(self.potential, state, momentum, is_split=self.dynamics == "split")
            self._moving = phase, StepGraph(phase.step, phase.num_done, momentum.device, warn=self.warn)
        phase, step = self._moving
        phase.write(state, momentum)
        for factors in parts(num_steps, step_size, dynamics=self.dynamics):
            phase.set(factors)
            step()
        return phase.state, phase.momentum


def mean_of_chains(z: Tensor, gradient: Tensor) -> Tensor:
    """The mean (P,) of what the chains at z (C, P) draw from, whose potential has this gradient (C, P) there.

    The gradient's own mean is 0 (Stein 1972), so that z - gradient has the mean of z; where the posterior is near N(0, I) it hardly
    varies, and each coordinate takes of the two what varies less between the chains. Their mean is shrunk towards 0, by as much
    of it as is noise (James and Stein 1961, the positive part): one chain, or chains that are all over the place, tell nothing.
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
    """What dual averaging compares with its goal: the mean acceptance, unless a chain is stuck; None while a chain falls.

    The mean hides one stuck chain behind the others. When the recent rate of a chain is below a quarter of the goal, it
    is the harmonic mean of the chains' recent rates, which one chain near zero pulls to zero (Hoffman, Radul and
    Sountsov use it throughout).

    Args:
        smoothed: (C,), each chain's recent acceptance rate.
        acceptance: (C,), of the last transition.
        target_accept: the goal.
        is_falling: (C,); what suits chains that fall is not what suits those that have landed.
    """
    harmonic = 1 / (1 / smoothed.clamp(min=1e-3)).mean()
    fallen = torch.zeros_like(harmonic) if is_falling is None else is_falling.any().to(harmonic)
    numbers = torch.stack([smoothed.min(), acceptance.mean(), harmonic, fallen])
    lowest, mean, harmonic_mean, has_fallen = numbers.tolist()  # one sync
    if has_fallen:
        return None
    return float(mean if lowest >= STUCK_SHARE * target_accept else harmonic_mean)


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
        largest = math.log(LONGEST_TURN)
        return cls(target_accept, math.log(10 * initial), largest, 0, 0.0, math.log(initial), math.log(initial))

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> StepSizeAdaptation:
        """The inverse of to_tensor."""
        goal, shrinkage_point, largest, num_updates, *rest = numbers.tolist()
        return cls(goal, shrinkage_point, largest, round(num_updates), *rest)

    def to_tensor(self) -> Tensor:
        """All of it, float64, to be stored."""
        return torch.tensor(self, dtype=torch.float64)

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
