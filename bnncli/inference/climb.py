"""A mode of a log posterior that is not concave, such as a whole network's: the one that steps uphill from the start lead to.

Quasi-Newton steps come first, in coordinates whitened by the curvature at hand, then Newton steps of a trust region by products
with the exact Hessian, which end as fast as in a concave target and leave saddles. Conjugate gradients alone, without the
first steps, take a great many products: far away the trust region is small. Nocedal and Wright (2006), Numerical
Optimization, algorithms 7.4 (L-BFGS), 4.1 and 7.2 (Steihaug).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.covariances import Covariance
from bnncli.errors import NumericError
from bnncli.inference.local_covariance import LocalCovariance, covariance_at
from bnncli.inference.memory import MAX_FULL_PRECONDITIONER
from bnncli.inference.mode import Mode
from bnncli.inference.trust_region import BoundedStep, solve_within
from bnncli.lazy import torch
from bnncli.machine import signals
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.target import UnevenTarget

if TYPE_CHECKING:
    from torch import Tensor

MOST_PASSES = 2000
TOLERANCE = 0.1  # of thousands of parameters together: half a hundredth of a nat
NEAR = 0.05  # posterior standard deviations a parameter: a centre so near to the mode is one, and its distance is told
_PASSES_A_PRODUCT = 2  # with the exact Hessian, beside a gradient, measured (LeNet-5: 1.8, an MLP: 1.7)
_PASSES_A_WHITENING = 4
_PAIRS = 20  # of L-BFGS
CLIMBING_VECTORS = (
    2 * _PAIRS + 16
)  # of P numbers, float64: the pairs, two places with their gradients, what steps are made of
_AGE = 100  # L-BFGS steps, after which the whitening is made again
_WINDOW = 10  # L-BFGS steps whose gain says whether they still pay
_SMALL_GAIN = 5e-3  # nats of the log joint in so many steps
_MOST_HALVINGS = 20
_SUFFICIENT_INCREASE = 1e-4  # Armijo constant, as usual
_SMALLEST_RADIUS = 3e-3  # posterior standard deviations: steps that must be shorter meet kinks, or rounding
_MOST_PRODUCTS = 150  # of a Newton step
_KINKS = "no step increases it further (with nonsmooth units such as ReLU, the gradient may not vanish at the mode)"


class Position(NamedTuple):
    """theta (P,), the log joint there, and its gradient (P,), float64."""

    theta: Tensor
    value: float
    gradient: Tensor


@dataclass
class _Effort:
    """Passes over the data, a gradient each, that were made and may be made.

    Args:
        target: of them.
        most: that may be made.
        task: where they are told.
    """

    target: UnevenTarget
    most: int
    task: Task
    spent: int = 0
    told: int = 0

    @property
    def is_over(self) -> bool:
        """Whether no more may be made."""
        return self.spent >= self.most

    def spend(self, passes: int) -> None:
        """Count some."""
        signals.raise_if_interrupted("the search for the mode")
        self.spent += passes

    def tell(self, place: Position, distance: float) -> None:
        """Say how far it is; of the distance alone what the whitening says of it."""
        note = f"log joint {place.value:.2f}, about {distance:.2g} standard deviations from the mode"
        self.task.advance(self.spent - self.told, note=note)
        self.told = self.spent

    def at(self, theta: Tensor, dtype: torch.dtype | None) -> Position:
        """The log joint and its gradient, one pass."""
        self.spend(1)
        value, gradient = self.target.log_joint_and_grad(theta.unsqueeze(0), dtype=dtype)
        return Position(theta, float(value), gradient[0])

    def whitening(self, theta: Tensor) -> LocalCovariance:
        """The covariance by the target's rough structure: of a full matrix, M P products an example take hundreds of passes."""
        self.spend(_PASSES_A_WHITENING)
        return covariance_at(self.target, theta, self.target.rough_structure)


def climb(
    target: UnevenTarget,
    start: Tensor,
    *,
    tolerance: float | None = None,
    most_passes: int | None = None,
    progress: Progress = SILENT,
) -> Mode:
    """A mode of target, within `tolerance` posterior standard deviations; or, with what it falls short by, within NEAR a parameter.

    Args:
        target: the log posterior.
        start: (P,).
        tolerance: bound on the Newton decrement, sqrt(g^T H^{-1} g), of all parameters together; by default as of a last layer
            where there are few, up to MAX_FULL_PRECONDITIONER, else TOLERANCE.
        most_passes: over the data before giving up, by default MOST_PASSES; a product with the Hessian counts as two.
        progress: advanced by passes.

    Raises:
        NumericError: it ended further away.
    """
    if tolerance is None:
        tolerance = 1e-3 if target.layout.num_params <= MAX_FULL_PRECONDITIONER else TOLERANCE
    most_passes = most_passes or MOST_PASSES
    effort = _Effort(target, most_passes, progress.task("mode", most_passes))
    place = effort.at(start.detach().to(target.device).double(), torch.float64)
    if not math.isfinite(place.value):
        raise NumericError("the log posterior is not finite", hint="check the scale of the inputs")
    whitening = effort.whitening(place.theta)
    place, whitening = _quasi_newton(effort, place, whitening, tolerance)
    place, ended = _newton(effort, place, whitening.covariance, tolerance)
    decrement = ended.decrement
    if ended.reason is not None:
        decrement = _decrement(target, place, whitening.covariance)
    if decrement > max(1.0, NEAR * math.sqrt(len(place.theta))):
        raise NumericError(
            f"found no mode after {effort.spent:,} passes over the data: the search is still {decrement:.2g} "
            f"posterior standard deviations away (a typical draw is about {math.sqrt(len(place.theta)):.0f} "
            f"away); {ended.reason}",
            hint="use a larger \0prior_precision\0, or \0center\0 checkpoint",
        )
    return Mode(
        place.theta,
        ended.num_steps,
        decrement,
        float(place.gradient.norm()),
        place.value,
        whitening.hessian,
        None,
        effort.spent,
        ended.reason,
    )


def _quasi_newton(
    effort: _Effort, place: Position, whitening: LocalCovariance, tolerance: float
) -> tuple[Position, LocalCovariance]:
    """L-BFGS steps as long as they pay, in the target's own precision; whitened again now and then, and at the end."""
    place = effort.at(place.theta, None)
    while True:
        gains: list[float] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        covariance = whitening.covariance
        white = covariance.pull_back(place.gradient.unsqueeze(0))[0]
        while len(gains) < _AGE:
            effort.tell(place, distance := float(white.norm()))
            if distance < tolerance or _is_slow(gains) or effort.spent > 0.7 * effort.most:
                return place, (effort.whitening(place.theta) if gains else whitening)
            direction = _two_loops(white, pairs)
            found = _search_along(effort, place, covariance.unwhiten(direction.unsqueeze(0))[0], None)
            if found is None and not pairs:
                return place, (effort.whitening(place.theta) if gains else whitening)
            if found is None:
                pairs.clear()
                continue
            moved, length = found
            new = covariance.pull_back(moved.gradient.unsqueeze(0))[0]
            step, change = length * direction, white - new
            if float(step @ change) > 1e-8 * float(step.norm() * change.norm()):
                pairs = [*pairs[1 - _PAIRS :], (step, change)]
            gains.append(moved.value - place.value)
            place, white = moved, new
        whitening = effort.whitening(place.theta)


def _is_slow(gains: list[float]) -> bool:
    """Whether the last steps gained next to nothing."""
    return len(gains) >= _WINDOW and sum(gains[-_WINDOW:]) < _SMALL_GAIN


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The inverse Hessian of steps and changes of the gradient (P,), times the gradient (P,)."""
    direction, kept = gradient.clone(), []
    for step, change in reversed(pairs):
        rho = 1 / (step @ change)
        alpha = rho * (step @ direction)
        direction -= alpha * change
        kept.append((alpha, rho))
    if pairs:
        step, change = pairs[-1]
        direction *= (step @ change) / (change @ change)
    for (step, change), (alpha, rho) in zip(pairs, reversed(kept), strict=True):
        direction += (alpha - rho * (change @ direction)) * step
    return direction


def _search_along(
    effort: _Effort, place: Position, direction: Tensor, dtype: torch.dtype | None
) -> tuple[Position, float] | None:
    """The first of ever shorter steps whose log joint increases sufficiently, with its length; None without any."""
    slope, length = float(place.gradient @ direction), 1.0
    if not slope > 0:
        return None
    for _ in range(_MOST_HALVINGS):
        found = effort.at(place.theta + length * direction, dtype)
        if found.value >= place.value + _SUFFICIENT_INCREASE * length * slope - 1e-13 * abs(place.value):
            return found, length
        missing = place.value + length * slope - found.value  # the parabola's maximum, where it is to be believed
        best = 0.5 * slope * length / missing if math.isfinite(missing) else 0.0
        length *= min(0.5, max(0.1, best))
    return None


class _Ended(NamedTuple):
    """How Newton's steps ended: how many, the last decrement, and why short of the tolerance, where they did."""

    num_steps: int
    decrement: float
    reason: str | None


def _newton(effort: _Effort, place: Position, covariance: Covariance, tolerance: float) -> tuple[Position, _Ended]:
    """Steps of a trust region by the exact Hessian, made shorter where they fail; values and gradients in float64.

    A search along a step takes a pass, another step for a smaller region tens of products (Nocedal and Yuan 1998).
    """
    place, radius, num_steps = effort.at(place.theta, torch.float64), math.inf, 0
    while True:
        white = covariance.pull_back(place.gradient.unsqueeze(0))
        distance = float(white.norm())
        effort.tell(place, distance)
        radius = min(radius, 10 * distance + 1)
        step = solve_within(
            _whitened(effort, place.theta, covariance),
            white,
            radius=radius,
            accuracy=min(0.1, max(1e-3, distance, 0.3 * tolerance / max(distance, 1e-300))),
            most_products=_MOST_PRODUCTS,
        )
        if step.is_inside and step.decrement < tolerance:
            return place, _Ended(num_steps, step.decrement, None)
        if effort.is_over:
            return place, _Ended(num_steps, math.nan, f"the limit of {effort.most:,} passes was reached")
        found = _search_along(effort, place, covariance.unwhiten(step.z)[0], torch.float64)
        if found is None:
            return place, _Ended(num_steps, math.nan, _KINKS)
        moved, length = found
        if length < 1:
            radius = length * step.length
        elif moved.value - place.value > 0.5 * step.promised and not step.is_inside:
            radius *= 2.5
        place, num_steps = moved, num_steps + 1
        if radius < _SMALLEST_RADIUS:
            return place, _Ended(num_steps, math.nan, _KINKS)


def _whitened(effort: _Effort, theta: Tensor, covariance: Covariance) -> Callable[[Tensor], Tensor]:
    """The product with the Hessian at theta in whitened coordinates."""
    multiply = effort.target.second_derivatives(theta)

    def product(vectors: Tensor) -> Tensor:
        effort.spend(_PASSES_A_PRODUCT)
        return covariance.pull_back(multiply(covariance.unwhiten(vectors)))

    return product


def _decrement(target: UnevenTarget, place: Position, covariance: Covariance) -> float:
    """sqrt(g^T H^{-1} g) by the Gauss-Newton matrix, which is positive definite everywhere."""
    multiply = target.hessian_operator(place.theta)
    step: BoundedStep = solve_within(
        lambda vectors: covariance.pull_back(multiply(covariance.unwhiten(vectors))),
        covariance.pull_back(place.gradient.unsqueeze(0)),
        radius=math.inf,
        accuracy=0.1,
        most_products=_MOST_PRODUCTS,
    )
    return step.decrement
