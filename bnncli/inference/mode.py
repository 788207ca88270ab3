"""Find the mode of a log posterior: by Newton steps where it is concave, by L-BFGS and a trust region elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bnncli import registry
from bnncli.errors import NumericError
from bnncli.inference import memory
from bnncli.inference.memory import MAX_FULL_PRECONDITIONER
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress, Task
from bnncli.structures import Covariance, cheapest_root, count_pass, ggn, structure_of
from bnncli.system import signals
from bnncli.system.memory import is_large
from bnncli.system.workers import team
from bnncli.targets.target import CurvedTarget, UnevenTarget

if TYPE_CHECKING:
    from torch import Tensor


class BoundedStep(NamedTuple):
    """A step z (1, P) within a trust region.

    Args:
        promised: increase of g^T z - z^T H z / 2.
        length: of z.
        is_inside: whether it solves H z = g to the given accuracy rather than ending on the boundary.
        decrement: sqrt(g^T z); if inside, the distance to the maximum in units of H.
    """

    z: Tensor
    promised: float
    length: float
    is_inside: bool
    decrement: float


def solve_within(
    multiply: Callable[[Tensor], Tensor], gradient: Tensor, *, radius: float, accuracy: float, most_products: int
) -> BoundedStep:
    """Maximise g^T z - z^T H z / 2 for |z| <= radius by truncated conjugate gradients.

    Args:
        multiply: multiplies (1, P), float64, by H.
        gradient: g (1, P), float64.
        radius: of the trust region.
        accuracy: of |H z - g| relative to |g|.
        most_products: limit on products with H; the current step is then returned.
    """
    z, residual, direction = torch.zeros_like(gradient), gradient.clone(), gradient.clone()
    square = float(residual.square().sum())
    goal, is_inside = accuracy**2 * square, True
    for _ in range(most_products):
        if square <= goal:
            break
        product = multiply(direction)
        curvature, along, size = torch.stack(
            [(direction * one).sum() for one in (product, z, direction)]
        ).tolist()  # the only sync, apart from the residual's
        length = square / curvature if curvature > 0 else math.inf
        reach = _to_edge(float(z.square().sum()), along, size, radius)
        is_inside = length < reach
        length = min(length, reach)
        if not math.isfinite(length):  # no curvature, and no boundary
            break
        z = z + length * direction
        residual = residual - length * product
        if not is_inside:
            break
        previous, square = square, float(residual.square().sum())
        direction = residual + (square / previous) * direction
    slope = float((gradient * z).sum())
    promised = 0.5 * (slope + float((residual * z).sum()))
    return BoundedStep(z, promised, float(z.norm()), is_inside, math.sqrt(max(slope, 0.0)))


def _to_edge(square: float, along: float, size: float, radius: float) -> float:
    """Return t > 0 with |z + t d| = radius, given |z|^2, z^T d and |d|^2; inf without a boundary."""
    if not math.isfinite(radius):
        return math.inf
    return (-along + math.sqrt(max(along**2 + size * (radius**2 - square), 0.0))) / size


_FULL = "full"
_ROWS = 512  # rows of H computed together when spread over workers


class LocalCovariance(NamedTuple):
    """A covariance, and the Hessian it was computed from.

    Args:
        covariance: (H + Lambda)^{-1}.
        hessian: H, without the prior, in the parts of the covariance's structure.
        saves_work: whether another covariance of the same structure and examples can reuse parts of it.
    """

    covariance: Covariance
    hessian: dict[str, Tensor]
    saves_work: bool


def covariance_at(
    target: CurvedTarget,
    theta: Tensor,
    structure: str,
    *,
    hessian: dict[str, Tensor] | None = None,
    before: LocalCovariance | None = None,
) -> LocalCovariance:
    """Return (H + Lambda)^{-1} at theta (P,), and H without the prior, computed unless given.

    Args:
        before: for the same examples; if it has the structure, parts that do not depend on theta are reused.

    Raises:
        NumericError: the precision is not positive definite.
        UsageError: there is no such structure.
    """
    if hessian is None and _is_spread(target, structure):
        return _spread(target, theta)
    kind = registry.load_class("covariances", structure)
    kept: dict[str, Any] = {}
    if before is not None and before.covariance.structure == structure and before.saves_work:
        kept = {"before": before.covariance}
    if hessian is None:
        hessian = ggn(target, theta, structure, before=before.hessian if before is not None and kept else None)
    covariance: Covariance = kind.from_hessian(hessian, target.prior, target.layout, **kept)
    return LocalCovariance(covariance, hessian, bool(target.curvature(structure).fixed))


def _is_spread(target: CurvedTarget, structure: str) -> bool:
    """Return whether the rows of H are spread over workers because no device can hold all of them."""
    others, layout = team(), target.layout
    if others is None or others.size == 1 or structure != _FULL or not is_large(layout.num_params):
        return False
    return hasattr(target.curvature(structure), "rows") and not memory.has_room_whole(layout, target.device)


def _spread(target: CurvedTarget, theta: Tensor) -> LocalCovariance:
    """Return the full covariance from rows of H that each worker computes for its own panels; H is float32 on the CPU."""
    from bnncli.structures.full import from_rows

    layout = target.layout
    count_pass(target)  # as on a single device, so that reported costs agree
    rows: Callable[[int, int], Tensor] = target.curvature(_FULL).rows(target, theta)  # type: ignore[attr-defined]
    hessian = torch.empty(layout.num_params, layout.num_params)
    total = 0.0
    for start in range(0, layout.num_params, _ROWS):
        part = rows(start, min(start + _ROWS, layout.num_params))
        total += float(part.diagonal(start).sum())
        hessian[start : start + _ROWS] = part.float().cpu()
    precisions = target.prior.diagonal(layout, device=target.device).double()
    mean = total / layout.num_params + float(precisions.mean())
    return LocalCovariance(from_rows(rows, precisions, mean=mean), {"hessian.full": hessian}, False)


_EXACT_WHITENING = "full"
_MAX_CG_ITERATIONS = 200
_MAX_HALVINGS = 30
_STALE_ITERATIONS = {"full": 40, "kron": -1}  # above it, a new Hessian pays off (measured: LeNet-5, P = 850)
_TOLERANCE = 1e-3  # posterior standard deviations, over all parameters
_MANY = 10_000  # parameters
_ROUGH = 0.05  # accuracy of a Newton step with low-precision products, ten times their error
_COARSE_FROM = 30.0  # standard deviations over all parameters: beyond it, values of large heads are float32
_NEAR = 3.0  # standard deviations over all parameters: within it, a step may be the last
_FAR, _ROUGHEST = 10.0, 0.25  # standard deviations over all parameters; accuracy of Newton steps further away
_TOLERANCE_OF_MANY = 0.1  # at most: five thousandths of a nat, when a draw is hundreds of standard deviations away
_ROUNDING = 1e-13  # relative, of a log joint
_ROUNDING_OF_COARSE = 1e-6  # relative, of a float32 log joint, if features are near zero
_SUFFICIENT_INCREASE = 1e-4  # the usual Armijo constant


@dataclass(frozen=True)
class Mode:
    """The mode, and how exact it is.

    Args:
        theta: (P,), float64.
        num_iterations: number of Newton steps.
        newton_decrement: distance to the exact mode in posterior standard deviations, over all parameters.
        gradient_norm: of the log joint, nats per unit of theta.
        log_joint: at theta, nats.
        hessian: of the negative log likelihood from near the mode, for find_mode under another prior.
        before: covariance that whitened the last steps if it saves work, else the one given.
        num_passes: over the data, if counted.
        shortfall: why the tolerance was not reached, or None.
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
    """Return the factor by which the tolerance over all parameters grows beyond _MANY, at equal accuracy per parameter."""
    return max(1.0, math.sqrt(num_params / _MANY))


def default_tolerance(num_params: int) -> float:
    """Return the default tolerance of the Newton decrement in posterior standard deviations, over all parameters."""
    return min(_TOLERANCE_OF_MANY, _TOLERANCE * max(1.0, num_params / _MANY) ** 2)


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
    """Find the mode of a concave target, within `tolerance` posterior standard deviations.

    Args:
        target: the log posterior.
        start: (P,), any finite theta.
        hessian: from near the mode; saves computing it.
        before: for the same examples; saves computing what does not depend on theta.
        tolerance: bound on the Newton decrement, sqrt(g^T H^{-1} g); by default `default_tolerance`.
        polish: end with a step after which the decrement is expected to meet the tolerance, extrapolated from its
            decrease, and take the log joint there from the quadratic model. Saves the last pass, which only confirms;
            always used above _MANY parameters.
        max_iterations: limit on Newton steps.
        progress: advances once per step.

    Raises:
        NumericError: the tolerance is not met.
    """
    tolerance = default_tolerance(target.layout.num_params) if tolerance is None else tolerance
    task = progress.task("mode", 0)
    with _keeping(target):
        here = _evaluate(target, start.detach().to(target.device).double().clone())
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
            if is_odd:  # low precision does not help, for example with features far from zero
                coarse_from, may_be_rough = math.inf, False
            if is_odd or (
                ends is not None and step.is_rough
            ):  # recompute in float64; low-precision values come with low-precision steps
                here = _evaluate(target, here.theta) if here.is_coarse else here
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
            here = _search_newton_step(target, here, step, coarse_from=coarse_from)
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
    """theta (P,), the log joint and its gradient (P,); is_coarse: in the target's own precision."""

    theta: Tensor
    value: float
    gradient: Tensor
    is_coarse: bool = False


class _Step(NamedTuple):
    """A Newton step (P,), in whitened coordinates (1, P); its length in posterior standard deviations; products with H."""

    direction: Tensor
    white: Tensor
    decrement: float
    num_products: int
    is_rough: bool


def _ends(step: _Step, previous: float, *, tolerance: float, accuracy: _Forcing, polish: bool) -> float | None:
    """Return the decrement at which the search ends, before or after this step; None if it continues."""
    if step.decrement < tolerance:
        return step.decrement
    is_large = accuracy.num_params > _MANY
    if not (polish or is_large):
        return None
    left = accuracy.given if is_large else _accuracy(step.decrement, polish=True)
    expected = _after_step(step.decrement, previous, left)
    return expected if expected < tolerance else None


def _after_step(decrement: float, previous: float, left: float) -> float:
    """Return the expected decrement after the next step.

    Quadratic convergence, plus a share `left` that conjugate gradients leave. Once small, the last two decrements give
    the rate; before, a unit factor is conservative.
    """
    factor = max(decrement / previous**2, 1e-2) if decrement < 1 and previous < 10 else 1.0
    return factor * decrement**2 + left * decrement


def _structure_for(target: CurvedTarget) -> str:
    """Return the structure to whiten with: an exact Hessian if it is small."""
    return _EXACT_WHITENING if target.layout.num_params <= MAX_FULL_PRECONDITIONER else target.rough_structure


def _keeping(target: CurvedTarget) -> AbstractContextManager[None]:
    """Let a target of many parameters cache, within this context, what products with its Hessian would recompute."""
    if target.layout.num_params <= _MANY:
        return nullcontext()
    keeping: Callable[[], AbstractContextManager[None]] = getattr(target, "keeping", nullcontext)
    return keeping()


def _evaluate(target: CurvedTarget, theta: Tensor, *, is_coarse: bool = False) -> _Place:
    """Evaluate log joint and gradient at theta (P,) in float64, or in the target's own precision."""
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
    """Solve for the Newton step H^{-1} gradient.

    Args:
        is_rough: allow low-precision products; the step is then no more exact than they are.
        begun: a rough solution (1, P), in whitened coordinates, to continue from.
    """
    root = cheapest_root(whitening)
    white_gradient = root.pull_back(here.gradient.unsqueeze(0))
    exactly = accuracy(float(white_gradient.norm()))
    # A step that is not solved exactly needs few digits, and for large heads products are most of the work.
    exactly = max(exactly, _ROUGH) if is_rough else exactly
    multiply = target.hessian_operator(here.theta, is_rough=is_rough)
    # For large heads these would take a third of the work in float64; the products between them are float32. No less: a
    # shift common to all outputs has no curvature, and rounding would give it some.
    inner = root
    if target.dtype != torch.float64 and target.layout.num_params > MAX_FULL_PRECONDITIONER:
        inner = root.to(dtype=torch.float32)
    white_step, num_products = conjugate_gradients(
        lambda v: inner.pull_back(multiply(inner.unwhiten(v))).double(),
        white_gradient,
        exactly,
        begun,
    )
    if not bool((white_gradient * white_step).sum() > 0):  # rounding hid the curvature: use the whitening's own step
        white_step = white_gradient
    direction = root.unwhiten(white_step)[0]
    decrement = math.sqrt(max(float(here.gradient @ direction), 0.0))
    return _Step(direction, white_step, decrement, num_products, is_rough)


def _accuracy(distance: float, *, polish: bool, tolerance: float = 0.0) -> float:
    """Return the relative accuracy of a Newton step `distance` standard deviations from the mode.

    Higher near the mode, for quadratic convergence, but no higher than needed to bring the next step well below the
    tolerance (Dembo, Eisenstat and Steihaug 1982; Nocedal and Wright, section 7.1). A step that may be the last, with
    no pass to confirm it, is solved well.
    """
    if polish:
        return min(1e-2, max(1e-3, distance))
    return min(0.1, max(1e-3, distance, 0.3 * tolerance / max(distance, 1e-300)))


@dataclass
class _Forcing:
    """Accuracy of successive Newton steps: with many parameters far from the mode, only as good as the last step was.

    There the quadratic model itself has a larger error (Eisenstat and Walker 1996, SIAM J. Sci. Comput. 17, choice 2).

    Args:
        near: accuracy by distance, as for few parameters.
        tolerance: of the mode.
        previous: distance at the previous step.
        given: accuracy requested from the last step.
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
        elif self.num_params > _MANY and distance <= _NEAR:  # may be the last step
            self.given = min(self.given, max(_ROUGH, 0.5 * self.tolerance / distance))
        return self.given


def conjugate_gradients(
    multiply: Callable[[Tensor], Tensor], right: Tensor, accuracy: float, begun: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return x with |A x - right| <= accuracy |right|, for positive definite A given by products, and their number."""
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
        # The product underflowed: nothing to solve.
        length = length.nan_to_num_(nan=math.nan, posinf=0.0, neginf=0.0)
        x += length * direction
        residual -= length * product
        previous, square = square, residual.square().sum()
        direction = residual + (square / previous) * direction
        distance = float(square)  # the only sync
    return x, _MAX_CG_ITERATIONS


def _search_newton_step(target: CurvedTarget, here: _Place, step: _Step, *, coarse_from: float) -> _Place:
    """Return the first of theta + step, + step / 2, ... whose log joint increases sufficiently.

    For large heads more than `coarse_from` standard deviations from the mode, a float32 evaluation comes first; float64
    decides what it cannot.
    """
    slope, value = float(here.gradient @ step.direction), here.value
    is_coarse = len(here.theta) > _MANY and step.decrement > coarse_from
    first = _evaluate(target, here.theta + step.direction, is_coarse=is_coarse)
    wrong = _ROUNDING_OF_COARSE * abs(value) if is_coarse or here.is_coarse else -_ROUNDING * abs(value)
    if first.value >= value + _SUFFICIENT_INCREASE * slope + wrong:
        return first
    if here.is_coarse:
        value = _evaluate(target, here.theta).value
    rounding, length = _ROUNDING * abs(value), 1.0 if is_coarse else 0.5
    for _ in range(_MAX_HALVINGS):
        found = _evaluate(target, here.theta + length * step.direction)
        if found.value >= value + _SUFFICIENT_INCREASE * length * slope - rounding:
            return found
        length *= 0.5
    raise NumericError("the line search for the mode found no increase", hint="check the scale of the features")


MOST_PASSES = 2000
TOLERANCE = 0.1  # over thousands of parameters: five thousandths of a nat
NEAR = 0.05  # posterior standard deviations per parameter: such a centre is accepted, with its distance reported
_PASSES_A_PRODUCT = 2  # with the exact Hessian, besides a gradient, measured (LeNet-5: 1.8, an MLP: 1.7)
_PASSES_A_WHITENING = 4
_PAIRS = 20  # of L-BFGS
_AGE = 100  # L-BFGS steps after which the whitening is recomputed
_WINDOW = 10  # L-BFGS steps whose gain decides whether to continue
_SMALL_GAIN = 5e-3  # nats of the log joint within the window
_MOST_HALVINGS = 20
_SMALLEST_RADIUS = 3e-3  # posterior standard deviations: if steps must be shorter, kinks or rounding dominate
_MOST_PRODUCTS = 150  # per Newton step
_KINKS = "no step increases it further (with nonsmooth units such as ReLU, the gradient may not vanish at the mode)"


class Position(NamedTuple):
    """theta (P,), the log joint there, and its gradient (P,), float64."""

    theta: Tensor
    value: float
    gradient: Tensor


@dataclass
class _Effort:
    """Budget of passes over the data, one gradient each.

    Args:
        target: evaluated by the passes.
        most: limit.
        task: progress report.
    """

    target: UnevenTarget
    most: int
    task: Task
    spent: int = 0
    told: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        return self.spent >= self.most

    def spend(self, passes: int) -> None:
        """Count passes."""
        signals.raise_if_interrupted("the search for the mode")
        self.spent += passes

    def tell(self, place: Position, distance: float) -> None:
        """Report the distance, as estimated by the whitening."""
        note = f"log joint {place.value:.2f}, about {distance:.2g} standard deviations from the mode"
        self.task.advance(self.spent - self.told, note=note)
        self.told = self.spent

    def at(self, theta: Tensor, dtype: torch.dtype | None) -> Position:
        """Evaluate log joint and gradient in one pass."""
        self.spend(1)
        value, gradient = self.target.log_joint_and_grad(theta.unsqueeze(0), dtype=dtype)
        return Position(theta, float(value), gradient[0])

    def whitening(self, theta: Tensor) -> LocalCovariance:
        """Return a covariance of the target's rough structure; a full one takes M P products per example, hundreds of passes."""
        self.spend(_PASSES_A_WHITENING)
        return covariance_at(self.target, theta, self.target.rough_structure)


def climb_to_mode(
    target: UnevenTarget,
    start: Tensor,
    *,
    tolerance: float | None = None,
    most_passes: int | None = None,
    progress: Progress = SILENT,
) -> Mode:
    """Find a mode of a target within `tolerance`, or, with a recorded shortfall, within NEAR per parameter.

    Args:
        target: the log posterior.
        start: (P,).
        tolerance: bound on the Newton decrement, sqrt(g^T H^{-1} g), over all parameters; by default that of a last
            layer up to MAX_FULL_PRECONDITIONER parameters, else TOLERANCE.
        most_passes: limit on passes over the data, by default MOST_PASSES; a product with the Hessian counts as two.
        progress: advances by passes.

    Raises:
        NumericError: the search ended further away.
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
    """Take L-BFGS steps while they pay off, in the target's own precision; whiten again from time to time and at the end."""
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
            found = _search_uphill(effort, place, covariance.unwhiten(direction.unsqueeze(0))[0], None)
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
    """Return whether the last steps gained almost nothing."""
    return len(gains) >= _WINDOW and sum(gains[-_WINDOW:]) < _SMALL_GAIN


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Multiply the gradient (P,) by the L-BFGS inverse Hessian of pairs of steps and gradient changes (P,)."""
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


def _search_uphill(
    effort: _Effort, place: Position, direction: Tensor, dtype: torch.dtype | None
) -> tuple[Position, float] | None:
    """Return the first of successively shorter steps whose log joint increases sufficiently, and its length; None if none does."""
    slope, length = float(place.gradient @ direction), 1.0
    if not slope > 0:
        return None
    for _ in range(_MOST_HALVINGS):
        found = effort.at(place.theta + length * direction, dtype)
        if found.value >= place.value + _SUFFICIENT_INCREASE * length * slope - 1e-13 * abs(place.value):
            return found, length
        missing = place.value + length * slope - found.value  # try the parabola's maximum if it is plausible
        best = 0.5 * slope * length / missing if math.isfinite(missing) else 0.0
        length *= min(0.5, max(0.1, best))
    return None


class _Ended(NamedTuple):
    """End of the Newton steps: their number, the last decrement, and why the tolerance was missed, or None."""

    num_steps: int
    decrement: float
    reason: str | None


def _newton(effort: _Effort, place: Position, covariance: Covariance, tolerance: float) -> tuple[Position, _Ended]:
    """Take trust-region steps with the exact Hessian, shrinking the region after failures; values in float64.

    A search along a step takes one pass, another step for a smaller region tens of products (Nocedal and Yuan 1998).
    """
    place, radius, num_steps = effort.at(place.theta, torch.float64), math.inf, 0
    while True:
        white = covariance.pull_back(place.gradient.unsqueeze(0))
        distance = float(white.norm())
        effort.tell(place, distance)
        radius = min(radius, 10 * distance + 1)
        step = solve_within(
            _build_whitened_product(effort, place.theta, covariance),
            white,
            radius=radius,
            accuracy=min(0.1, max(1e-3, distance, 0.3 * tolerance / max(distance, 1e-300))),
            most_products=_MOST_PRODUCTS,
        )
        if step.is_inside and step.decrement < tolerance:
            return place, _Ended(num_steps, step.decrement, None)
        if effort.is_over:
            return place, _Ended(num_steps, math.nan, f"the limit of {effort.most:,} passes was reached")
        found = _search_uphill(effort, place, covariance.unwhiten(step.z)[0], torch.float64)
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


def _build_whitened_product(effort: _Effort, theta: Tensor, covariance: Covariance) -> Callable[[Tensor], Tensor]:
    """Return the product with the Hessian at theta in whitened coordinates."""
    multiply = effort.target.second_derivatives(theta)

    def product(vectors: Tensor) -> Tensor:
        effort.spend(_PASSES_A_PRODUCT)
        return covariance.pull_back(multiply(covariance.unwhiten(vectors)))

    return product


def _decrement(target: UnevenTarget, place: Position, covariance: Covariance) -> float:
    """Return sqrt(g^T H^{-1} g) with the Gauss-Newton matrix, which is positive semidefinite everywhere."""
    multiply = target.hessian_operator(place.theta)
    step: BoundedStep = solve_within(
        lambda vectors: covariance.pull_back(multiply(covariance.unwhiten(vectors))),
        covariance.pull_back(place.gradient.unsqueeze(0)),
        radius=math.inf,
        accuracy=0.1,
        most_products=_MOST_PRODUCTS,
    )
    return step.decrement


def find_suitable_mode(
    target: CurvedTarget,
    start: Tensor,
    *,
    tolerance: float | None = None,
    progress: Progress = SILENT,
    **known: Any,
) -> Mode:
    """Find the mode that start (P,) leads to, with the method and default tolerance that suit the target.

    Args:
        known: for concave targets, what saves work; see find_mode.

    Raises:
        NumericError: the mode was not found.
    """
    asked: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    if target.is_concave:
        return find_mode(target, start, progress=progress, **asked, **known)
    return climb_to_mode(cast(UnevenTarget, target), start, progress=progress, **asked)
