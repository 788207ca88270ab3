"""Hamiltonian motion of many chains in whitened coordinates: the potential, one trajectory of either kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bnncli.covariances import Covariance
from bnncli.targets.last_layer import LastLayerTarget

DYNAMICS = ("split", "leapfrog")


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
        covariance: L L^T.
    """

    target: LastLayerTarget
    mode: Tensor
    covariance: Covariance

    def theta(self, z: Tensor) -> Tensor:
        """theta (C, P) at z (C, P)."""
        return self.mode + self.covariance.unwhiten(z)

    def state(self, z: Tensor) -> State:
        """Potential and gradient at z (C, P), as one pass over the data."""
        log_joint, gradient = self.target.log_joint_and_grad(self.theta(z))
        return State(z, -log_joint, -self.covariance.pull_back(gradient))


def trajectory(
    potential: WhitenedPotential,
    state: State,
    momentum: Tensor,
    *,
    step_size: float,
    num_steps: int,
    dynamics: str,
) -> tuple[State, Tensor]:
    """The chains and their momenta (C, P) after num_steps steps: reversible and volume-preserving.

    split: half a kick by the gradient of potential - |z|^2 / 2, a rotation of (z, momentum) by step_size, half a kick.
    leapfrog: half a kick by the gradient of the potential, a straight move, half a kick.
    """
    is_split = dynamics == "split"
    cosine, sine = math.cos(step_size), math.sin(step_size)
    for _ in range(num_steps):
        momentum = momentum - 0.5 * step_size * _force(state, is_split)
        if is_split:
            z, momentum = cosine * state.z + sine * momentum, cosine * momentum - sine * state.z
        else:
            z = state.z + step_size * momentum
        state = potential.state(z)
        momentum = momentum - 0.5 * step_size * _force(state, is_split)
    return state, momentum


def _force(state: State, is_split: bool) -> Tensor:
    return state.gradient - state.z if is_split else state.gradient
