"""Hamiltonian motion of many chains in whitened coordinates: the potential, trajectories, one transition.

Neal (2011), arXiv:1206.1901; the split of the Hamiltonian into a Gaussian and the rest: Shahbaba, Lan, Johnson and Neal
(2014), arXiv:1106.5941, section 3.1; steps of several stages: Blanes, Casas and Sanz-Serna (2014), arXiv:1405.3153. On a GPU
nothing here waits for it: steps are counted on the CPU, and random numbers made there, or on the GPU where they are many
(posteriors.standard_normal).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from bnncli.covariances import Root
from bnncli.lazy import torch
from bnncli.posteriors import move, standard_normal
from bnncli.targets.target import WholeTarget

if TYPE_CHECKING:
    from torch import Tensor

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
