"""The exact mode of the log posterior, by Newton steps whose systems conjugate gradients solve.

A last layer's log posterior is strictly concave, so that its mode is unique; others may have many, of which this is the one
that steps uphill from the start lead to. Systems are solved in coordinates whitened by an earlier Hessian, full where it is
small and made again when it has become too old to help, else of the target's rough structure: Kronecker-factored for a last
layer, whose outputs' factor is made again at every step, for half the price of one product.
Products with the Hessian are float32, values and gradients float64, so that the result is exact. Of large heads one pass makes the
probabilities for all of these, and far from the mode values are float32 and products have fewer digits; what ends the search has not.
Nocedal and Wright (2006), Numerical Optimization, algorithms 3.1 and 7.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bnncli.covariances import Covariance, cheapest_root
from bnncli.curvature import structure_of
from bnncli.errors import NumericError
from bnncli.inference.local_covariance import LocalCovariance, covariance_at
from bnncli.inference.memory import MAX_FULL_PRECONDITIONER
from bnncli.lazy import torch
from bnncli.machine import signals
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

_EXACT_WHITENING = "full"
_MAX_CG_ITERATIONS = 200
_MAX_HALVINGS = 30
_STALE_ITERATIONS = {"full": 40, "kron": -1}  # more than this, and a new Hessian pays (measured: LeNet-5, P = 850)
_TOLERANCE = 1e-3  # posterior standard deviations, all parameters together
_FEW, _MANY = 10_000, 100_000  # parameters
_ROUGH = 0.05  # accuracy of a Newton step by rough products, ten times what they are off by
_COARSE_FROM = 30.0  # standard deviations, of all together: where values of large heads are float32
_NEAR = 3.0  # standard deviations, of all together: where a step may be the last one
_FAR, _ROUGHEST = 10.0, 0.5  # standard deviations, of all together; accuracy of a Newton step further away
_TOLERANCE_OF_MANY = 0.1  # five thousandths of a nat, where a draw is hundreds of standard deviations away
_ROUNDING = 1e-13  # of a log joint, of its own size
_ROUNDING_OF_COARSE = 1e-6  # of one of float32 at most, where features are near zero
_SUFFICIENT_INCREASE = 1e-4  # Armijo constant, as usual


@dataclass(frozen=True)
class Mode:
    """The mode, and how exact it is.

    Args:
        theta: (P,), float64.
        num_iterations: Newton steps taken.
        newton_decrement: distance to the exact mode in posterior standard deviations, all parameters together.
        gradient_norm: of the log joint, nats per unit of theta.
        log_joint: at theta, nats.
        hessian: a Hessian of the negative log likelihood from near the mode, for find_mode under another prior.
        before: the covariance that whitened the last steps where it saves work, else the one that was given, for the same.
        num_passes: over the data, where that is what was counted.
        shortfall: why it is no nearer, where it is further away than was asked for.
    """

    theta: Tensor
    num_iterations: int
    newton_decrement: float
    gradient_norm: float
    log_joint: float
    hessian: dict[str, Tensor]
    before: LocalCovariance | None
    num_passes: int | None = None
    shortfall: str | None = None


def tolerance_factor(num_params: int) -> float:
    """By how much a tolerance for all parameters together may be larger of so many than of _FEW, each being as exact."""
    return max(1.0, math.sqrt(num_params / _FEW))


def default_tolerance(num_params: int) -> float:
    """Of the Newton decrement of so many parameters together, in posterior standard deviations."""
    return _TOLERANCE_OF_MANY if num_params > _MANY else _TOLERANCE * tolerance_factor(num_params)


def find_mode(
    target: CurvedTarget,
    start: Tensor,
    *,
    hessian: dict[str, Tensor] | None = None,
    before: LocalCovariance | None = None,
    tolerance: float | None = None,
    polish: bool = False,
    max_iterations: int = 100,
    progress: Progress = SILENT,
) -> Mode:
    """The mode of target, within `tolerance` posterior standard deviations.

    Args:
        target: the log posterior.
        start: (P,), where to start; any finite theta will do.
        hessian: from near the mode, saves making it.
        before: of the same examples, saves what no theta changes.
        tolerance: bound on the Newton decrement, sqrt(g^T H^{-1} g); by default `default_tolerance`.
        polish: end with a step after which the decrement is expected to meet the tolerance, from how fast it has fallen, and
            take the log joint there from the quadratic model: saves the last pass, which only confirms. Of more than
            _MANY parameters always.
        max_iterations: Newton steps before giving up.
        progress: advanced once a step.

    Raises:
        NumericError: when the steps end before the tolerance is met.
    """
    tolerance = default_tolerance(target.layout.num_params) if tolerance is None else tolerance
    task = progress.task("mode", 0)
    with _keeping(target):
        here = _evaluated(target, start.detach().to(target.device).double().clone())
        structure = structure_of(hessian) if hessian else _structure_for(target)
        whitening = covariance_at(target, here.theta, structure, hessian=hessian, before=before)
        before = whitening if whitening.saves_work else before
        previous, was_rough, coarse_from = math.inf, False, _COARSE_FROM
        accuracy = _Forcing(len(start), partial(_accuracy, tolerance=tolerance, polish=polish), tolerance)
        may_be_rough = len(start) > _MANY
        for iteration in range(max_iterations):
            step = _newton_step(target, here, whitening=whitening.covariance, accuracy=accuracy, is_rough=may_be_rough)
            ends = _ends(step, previous, tolerance=tolerance, accuracy=accuracy, polish=polish)
            is_odd = (here.is_coarse or was_rough) and step.decrement >= previous
            if is_odd:  # features far from zero, say, of which few digits tell nothing
                coarse_from, may_be_rough = math.inf, False
            if is_odd or (
                ends is not None and step.is_rough
            ):  # to be seen by all digits; coarse values come with rough steps
                here = _evaluated(target, here.theta) if here.is_coarse else here
                begun = None if is_odd else step.white
                step = _newton_step(target, here, whitening=whitening.covariance, accuracy=accuracy, begun=begun)
                ends = _ends(step, previous, tolerance=tolerance, accuracy=accuracy, polish=polish)
            if ends is not None:
                theta, value = here.theta, here.value
                if step.decrement >= tolerance:
                    theta, value, iteration = theta + step.direction, value + 0.5 * step.decrement**2, iteration + 1
                norm = float(here.gradient.norm())
                return Mode(theta, iteration, ends, norm, value, whitening.hessian, before)
            task.advance(note=f"log joint {here.value:.1f}, decrement {step.decrement:.2g}")
            here = _search_along(target, here, step, coarse_from=coarse_from)
            previous, was_rough = step.decrement, step.is_rough
            stale = _STALE_ITERATIONS.get(whitening.covariance.structure, _STALE_ITERATIONS[_EXACT_WHITENING])
            if step.num_products > stale:
                whitening = covariance_at(target, here.theta, _structure_for(target), before=before)
                before = whitening if whitening.saves_work else before
    raise NumericError(
        f"found no mode after {max_iterations} Newton steps: the search is still {step.decrement:.2g} standard "
        f"deviations away (tolerance {tolerance:g})",
        hint="use a larger \0prior_precision\0",
    )


class _Place(NamedTuple):
    """A theta (P,), the log joint there, and its gradient (P,); is_coarse: in the target's own precision."""

    theta: Tensor
    value: float
    gradient: Tensor
    is_coarse: bool = False


class _Step(NamedTuple):
    """A Newton step (P,), in whitened coordinates (1, P); its length in posterior standard deviations, and the products with H that it took."""

    direction: Tensor
    white: Tensor
    decrement: float
    num_products: int
    is_rough: bool


def _ends(step: _Step, previous: float, *, tolerance: float, accuracy: _Forcing, polish: bool) -> float | None:
    """The decrement with which the search ends, where the step was made or behind it; None where it goes on."""
    if step.decrement < tolerance:
        return step.decrement
    is_large = accuracy.num_params > _MANY
    if not (polish or is_large):
        return None
    left = accuracy.given if is_large else _accuracy(step.decrement, polish=True)
    expected = _after_step(step.decrement, previous, left)
    return expected if expected < tolerance else None


def _after_step(decrement: float, previous: float, left: float) -> float:
    """The decrement expected after the next step: quadratic convergence, and what conjugate gradients leave, a share `left` of it.

    The last two decrements say how fast it is, once they are small; before that, a unit factor errs on the safe side.
    """
    factor = max(decrement / previous**2, 1e-2) if decrement < 1 and previous < 10 else 1.0
    return factor * decrement**2 + left * decrement


def _structure_for(target: CurvedTarget) -> str:
    """What to whiten with: an exact Hessian where that is small."""
    return _EXACT_WHITENING if target.layout.num_params <= MAX_FULL_PRECONDITIONER else target.rough_structure


def _keeping(target: CurvedTarget) -> AbstractContextManager[None]:
    """Within, a target of many parameters keeps of an evaluation what products with its Hessian would make again, where it can."""
    if target.layout.num_params <= _MANY:
        return nullcontext()
    keeping: Callable[[], AbstractContextManager[None]] = getattr(target, "keeping", nullcontext)
    return keeping()


def _evaluated(target: CurvedTarget, theta: Tensor, *, is_coarse: bool = False) -> _Place:
    """Log joint and gradient at theta (P,), by products in float64, or in the target's own precision."""
    value, gradient = target.log_joint_and_grad(theta.unsqueeze(0), dtype=None if is_coarse else torch.float64)
    if not math.isfinite(value):
        raise NumericError("the log posterior is not finite", hint="check the scale of the features")
    return _Place(theta, float(value), gradient[0], is_coarse)


def _newton_step(
    target: CurvedTarget,
    here: _Place,
    *,
    whitening: Covariance,
    accuracy: Callable[[float], float],
    is_rough: bool = False,
    begun: Tensor | None = None,
) -> _Step:
    """H^{-1} gradient.

    Args:
        is_rough: whether products may be, and the step is no more exact than that.
        begun: a rough solution (1, P), in whitened coordinates, to go on from.
    """
    root = cheapest_root(whitening)
    white_gradient = root.pull_back(here.gradient.unsqueeze(0))
    exactly = accuracy(float(white_gradient.norm()))
    # A few digits are enough for a step that is not solved exactly, and of large heads the products are most of the work.
    exactly = max(exactly, _ROUGH) if is_rough else exactly
    multiply = target.hessian_operator(here.theta, is_rough=is_rough)
    # Of large heads these are a third of the work in float64; the products between them have float32's digits. Not fewer: a shift that all
    # outputs share has no curvature, and would get some.
    inner = root
    if target.dtype != torch.float64 and target.layout.num_params > MAX_FULL_PRECONDITIONER:
        inner = root.to(dtype=torch.float32)
    white_step, num_products = conjugate_gradients(
        lambda v: inner.pull_back(multiply(inner.unwhiten(v))).double(),
        white_gradient,
        exactly,
        begun,
    )
    if not bool(
        (white_gradient * white_step).sum() > 0
    ):  # the products' rounding hid the curvature: the whitening's own step
        white_step = white_gradient
    direction = root.unwhiten(white_step)[0]
    decrement = math.sqrt(max(float(here.gradient @ direction), 0.0))
    return _Step(direction, white_step, decrement, num_products, is_rough)


def _accuracy(distance: float, *, polish: bool, tolerance: float = 0.0) -> float:
    """How exactly a Newton step is solved, `distance` standard deviations from the mode.

    More exactly when near, so that convergence is quadratic in the end; but no more than brings the next step well below
    the tolerance (Dembo, Eisenstat and Steihaug 1982; Nocedal and Wright, section 7.1). A step that may be the last one,
    with no pass to confirm it, is solved well.
    """
    if polish:
        return min(1e-2, max(1e-3, distance))
    return min(0.1, max(1e-3, distance, 0.3 * tolerance / max(distance, 1e-300)))


@dataclass
class _Forcing:
    """How exactly each Newton step is solved, in turn: of many parameters far from the mode only as well as the last step has gone.

    There the quadratic model itself is wrong by more (Eisenstat and Walker 1996, SIAM J. Sci. Comput. 17, choice 2).

    Args:
        near: by the distance, as of few parameters.
        tolerance: of the mode.
        previous: distance of the step before.
        given: what the last step was to be solved to.
    """

    num_params: int
    near: Callable[[float], float]
    tolerance: float
    previous: float = math.inf
    given: float = math.nan

    def __call__(self, distance: float) -> float:
        fallen = min(1.0, distance / self.previous) if math.isfinite(self.previous) else 1.0
        self.previous = distance
        self.given = self.near(distance)
        if self.num_params > _MANY and distance > _FAR:
            self.given = max(self.given, min(_ROUGHEST, 0.9 * fallen**2))
        elif self.num_params > _MANY and distance <= _NEAR:  # a step that may be the last one
            self.given = min(self.given, max(_ROUGH, 0.5 * self.tolerance / distance))
        return self.given


def conjugate_gradients(
    multiply: Callable[[Tensor], Tensor], right: Tensor, accuracy: float, begun: Tensor | None = None
) -> tuple[Tensor, int]:
    """x with |A x - right| <= accuracy |right|, A positive definite and given as a product; and products taken."""
    x = torch.zeros_like(right) if begun is None else begun.clone()
    residual, taken = (right.clone(), 0) if begun is None else (right - multiply(x), 1)
    direction, square = residual.clone(), residual.square().sum()
    distance = float(square)
    goal = accuracy**2 * (distance if begun is None else float(right.square().sum()))
    for iteration in range(taken, _MAX_CG_ITERATIONS):
        if distance <= goal:
            return x, iteration
        signals.raise_if_interrupted("the search for the mode")
        product = multiply(direction)
        length = square / (direction * product).sum()
        # A product below the smallest number: nothing to solve.
        length = length.nan_to_num_(nan=math.nan, posinf=0.0, neginf=0.0)
        x += length * direction
        residual -= length * product
        previous, square = square, residual.square().sum()
        direction = residual + (square / previous) * direction
        distance = float(square)  # the one wait for the device
    return x, _MAX_CG_ITERATIONS


def _search_along(target: CurvedTarget, here: _Place, step: _Step, *, coarse_from: float) -> _Place:
    """The first of theta + step, + step / 2, ... whose log joint increases sufficiently.

    Of large heads a look in float32 comes first, `coarse_from` standard deviations from the mode. What it does not show, float64 has to.
    """
    slope, value = float(here.gradient @ step.direction), here.value
    is_coarse = len(here.theta) > _MANY and step.decrement > coarse_from
    first = _evaluated(target, here.theta + step.direction, is_coarse=is_coarse)
    wrong = _ROUNDING_OF_COARSE * abs(value) if is_coarse or here.is_coarse else -_ROUNDING * abs(value)
    if first.value >= value + _SUFFICIENT_INCREASE * slope + wrong:
        return first
    if here.is_coarse:
        value = _evaluated(target, here.theta).value
    rounding, length = _ROUNDING * abs(value), 1.0 if is_coarse else 0.5
    for _ in range(_MAX_HALVINGS):
        found = _evaluated(target, here.theta + length * step.direction)
        if found.value >= value + _SUFFICIENT_INCREASE * length * slope - rounding:
            return found
        length *= 0.5
    raise NumericError("the line search for the mode found no increase", hint="check the scale of the features")
