"""What `scaling.py` times at each point, and the work that each must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import machine
import torch
from machine import Work

from bnncli.inference.dynamics import WhitenedPotential, transition
from bnncli.inference.mode import covariance_at, find_mode
from bnncli.inference.refine import fit_flow
from bnncli.numerics.random import stream
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn
from bnncli.targets.last_layer import LastLayerTarget

PRIOR_PRECISION = 100.0
NUM_DRAWS = 8  # of a value and gradient, and of a refine step
NUM_CHAINS = 16
REFINE_STEPS = 4
STEP_SIZE = 1.0  # of hmc, in posterior standard deviations: two gradients a transition or so


class Sizes(NamedTuple):
    """Of one point."""

    N: int
    D: int
    K: int

    @property
    def layout(self) -> HeadLayout:
        """Of its head."""
        return HeadLayout(self.K, self.D)

    @property
    def bytes(self) -> int:
        """Of its features, float32."""
        return 4 * self.N * self.D


@dataclass(frozen=True)
class Point:
    """A target, and what its jobs start from."""

    target: LastLayerTarget

    @property
    def zeros(self) -> torch.Tensor:
        """Where all jobs start, (P,)."""
        return torch.zeros(self.target.layout.num_params, dtype=torch.float64, device=self.target.device)

    @cached_property
    def base(self) -> Gaussian:
        """The Kronecker Gaussian at zero, made once: it is not what hmc and refine are timed for."""
        covariance = covariance_at(self.target, self.zeros, "kron").covariance
        return Gaussian(self.zeros, covariance, self.target.layout, self.target.prior)


class Job(NamedTuple):
    """What is timed, and the work it must do; `count` is what the run returned: how often it did it."""

    run: Callable[[Point], float]
    work: Callable[[Sizes], Work]
    structure: str


def _run_gradient(point: Point) -> float:
    target = point.target
    theta = 0.1 * torch.randn(NUM_DRAWS, target.layout.num_params, generator=stream(0, "bench/theta"))
    target.log_joint_and_grad(theta.to(target.device))
    return 1.0


def _run_curvature(structure: str) -> Callable[[Point], float]:
    def run(point: Point) -> float:
        ggn(point.target, point.zeros, structure)
        return 1.0

    return run


def _run_mode(point: Point) -> float:
    """A Newton step counts as one; how many conjugate gradients it takes is the problem's, not the size's."""
    return float(max(1, find_mode(point.target, point.zeros).num_iterations))


def _run_hmc(point: Point) -> float:
    """Steps of one transition, after a covariance that is made once a target."""
    target = point.target
    potential = WhitenedPotential(target, point.zeros, point.base.covariance)
    generator = stream(0, "bench/hmc")
    z = torch.randn(NUM_CHAINS, target.layout.num_params, generator=generator, dtype=torch.float64).to(target.device)
    state = potential.state(z)
    return 1.0 + transition(potential, state, generator, STEP_SIZE, "split").num_steps


def _run_refine(point: Point) -> float:
    target = point.target
    fit_flow(
        target, point.base, flow="radial", length=5, space="weight", epochs=REFINE_STEPS, learning_rate=0.01,
        batch_size=target.num_examples, num_draws=NUM_DRAWS, generator=stream(0, "bench/refine"),
    )  # fmt: skip
    return float(REFINE_STEPS)


def _gradients(draws: int, *, roots: int = 0, is_double: bool = False) -> Callable[[Sizes], Work]:
    """A value and gradient of some draws, and products of a Kronecker root."""

    def work(sizes: Sizes) -> Work:
        roots_work = machine.root_product_work("kron", sizes.layout, draws=roots, is_double=is_double)
        return machine.gradient_work(sizes.N, sizes.layout, draws=draws).plus(roots_work)

    return work


def _mode_work(sizes: Sizes) -> Work:
    """A value and gradient in float64, and a product with the Hessian."""
    gradient = machine.gradient_work(sizes.N, sizes.layout, is_double=True)
    return gradient.plus(machine.gradient_work(sizes.N, sizes.layout))


JOBS = {
    "gradient": Job(_run_gradient, _gradients(NUM_DRAWS), "diag"),
    "kron": Job(_run_curvature("kron"), lambda sizes: machine.curvature_work("kron", sizes.N, sizes.layout), "kron"),
    "full": Job(_run_curvature("full"), lambda sizes: machine.curvature_work("full", sizes.N, sizes.layout), "full"),
    "mode": Job(_run_mode, _mode_work, "kron"),
    "hmc": Job(_run_hmc, _gradients(NUM_CHAINS, roots=2 * NUM_CHAINS, is_double=True), "kron"),
    "refine": Job(_run_refine, _gradients(NUM_DRAWS, roots=NUM_DRAWS), "kron"),
}
