"""One prior precision a layer: those of the largest marginal likelihood about one theta, where H is made once.

log Z = log p(D | theta) + log N(theta | 0, Lambda^{-1}) + P / 2 log(2 pi) - log|H + Lambda| / 2. With t_l the trace of a layer's
part of Sigma, its derivative by log lambda_l is (P_l - lambda_l |theta_l|^2 - lambda_l t_l) / 2. MacKay's update, lambda_l =
(P_l - lambda_l t_l) / |theta_l|^2 (1992, Neural Computation 4(3)), is quick but may overshoot: of a layer that the data say little
of it leads from one side of the best precision as far to the other, and back. A step that turns back is halved, in log lambda_l,
and those after it. Where a step lowers log Z, lambda_l = P_l /
(|theta_l|^2 + t_l) takes its place: -log|H + Lambda| / 2 is convex in the precisions and lies above its tangent, whose sum with the
rest that maximises, so that log Z never falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.covariances import varying_places
from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.local_covariance import covariance_at
from bnncli.lazy import torch
from bnncli.theta.modules import module_places
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget
    from bnncli.theta.layout import ParamLayout

BOUNDS = (1e-4, 1e7)  # of a precision: a layer of zeros would have any, however large
_MOST_UPDATES = 200
_TOLERANCE = 1e-3  # of a log precision
_SLOWEST = 0.125  # of a step, which turns back where it is longer than twice the way
_STEP = 1e-3  # of a log precision, for differences of the log determinant: central, so wrong by a millionth


@dataclass(frozen=True)
class LayerPrecisions:
    """What was chosen.

    Args:
        fit: the Gaussian under it.
        precisions: by module, of those that vary.
        gain: in log marginal likelihood over the fit that it started from, nats.
    """

    fit: LaplaceFit
    precisions: dict[str, float]
    gain: float


def choose_layer_precisions(target: CurvedTarget, start: LaplaceFit, structure: str) -> LayerPrecisions:
    """The Gaussian about the mean of `start`, of the same H, under the best precision of each layer.

    Raises:
        NumericError: H plus the prior's precisions is not positive definite.
    """
    theta, layout = start.gaussian.mean, target.layout
    varies = _varies(start.gaussian.covariance, theta)
    places = {name: place for name, place in module_places(layout).items() if bool(varies[place].any())}
    moving = varies * theta.square()
    squares = torch.tensor([float(moving[place].sum()) for place in places.values()], dtype=torch.float64)
    sizes = torch.tensor([float(varies[place].sum()) for place in places.values()], dtype=torch.float64)
    first = start.gaussian.require_prior().weight_precision
    logs = torch.full_like(sizes, math.log(first))

    def under(logs: Tensor) -> CurvedTarget:
        return target.with_prior(_prior(dict(zip(places, logs.exp().tolist(), strict=True)), first, layout))

    def covariance_under(logs: Tensor) -> Covariance:
        return covariance_at(under(logs), theta, structure, hessian=start.hessian).covariance

    def value(logs: Tensor, covariance: Covariance) -> float:
        return covariance.log_det_scale() + 0.5 * float((sizes * logs - logs.exp() * squares).sum())

    def shares(logs: Tensor, covariance: Covariance) -> Tensor:
        """lambda_l t_l of each layer, (L,)."""
        marginal = getattr(covariance, "marginal_variances", None)
        if marginal is not None:
            own = marginal()
            return logs.exp() * torch.tensor(
                [float(own[place].sum()) for place in places.values()], dtype=torch.float64
            )
        found = []
        for index in range(len(logs)):
            change = torch.zeros_like(logs)
            change[index] = _STEP
            up, down = (covariance_under(logs + sign * change).log_det_scale() for sign in (1, -1))
            found.append((down - up) / _STEP)
        return torch.tensor(found, dtype=torch.float64)

    covariance = covariance_under(logs)
    reached = begun = value(logs, covariance)
    pace, before = torch.ones_like(sizes), torch.zeros_like(sizes)
    for _ in range(_MOST_UPDATES):
        taken = shares(logs, covariance).clamp(torch.zeros_like(sizes), sizes)
        aim = quick_update(sizes, squares, taken)
        step = aim - logs
        pace, before = torch.where(step * before < 0, 0.5 * pace, pace).clamp_min(_SLOWEST), step
        new = torch.where(pace < 1, logs + pace * step, aim)
        proposed = covariance_under(new)
        if not value(new, proposed) >= reached:
            aim = new = safe_update(sizes, squares, taken * (-logs).exp())
            proposed = covariance_under(new)
        missed = float((aim - logs).abs().max())
        logs, covariance, reached = new, proposed, value(new, proposed)
        if missed < _TOLERANCE:
            break
    if not math.isfinite(reached):
        raise NumericError(
            "the marginal likelihood of the per-layer precisions is not finite", hint="give \0prior_precision\0"
        )
    fit = fit_gaussian(under(logs), start=theta, structure=structure, center="checkpoint", hessian=start.hessian)
    precisions = {name: float(one) for name, one in zip(places, logs.exp(), strict=True)}
    return LayerPrecisions(fit, precisions, reached - begun)


def quick_update(sizes: Tensor, squares: Tensor, shares: Tensor) -> Tensor:
    """MacKay's, log precisions (L,), of P_l, |theta_l|^2 and lambda_l t_l, (L,) each."""
    return _within_bounds((sizes - shares).clamp_min(1e-12) / squares)


def safe_update(sizes: Tensor, squares: Tensor, traces: Tensor) -> Tensor:
    """The one that never lowers log Z, log precisions (L,), of P_l, |theta_l|^2 and t_l, (L,) each."""
    return _within_bounds(sizes / (squares + traces))


def _within_bounds(precisions: Tensor) -> Tensor:
    low, high = map(math.log, BOUNDS)
    return precisions.log().clamp(low, high)


def _varies(covariance: Covariance, theta: Tensor) -> Tensor:
    """One for each parameter that varies, zero for one that a covariance fixes at theta (P,)."""
    places = varying_places(covariance)
    if places is None:
        return torch.ones_like(theta)
    return torch.zeros_like(theta).index_fill(0, places, 1.0)


def _prior(precisions: dict[str, float], otherwise: float, layout: ParamLayout) -> Prior:
    """The prior of modules' precisions by name, a number for each part of theta; another one of modules that do not vary."""
    found = {module: precisions.get(module, otherwise) for module in module_places(layout)}
    return Prior.of_parts([found[part.name.rpartition(".")[0]] for part in layout.parts], layout)
