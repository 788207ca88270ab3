"""The Laplace approximation: a Gaussian with the curvature of the log posterior at its mode.

Includes the evidence, the effective number of parameters, the row-space reduction of last layers, and draws by
conjugate gradients for networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import NumericError
from bnncli.inference.mode import LocalCovariance, Mode, covariance_at, find_suitable_mode
from bnncli.lazy import torch
from bnncli.names import add_article
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.structures import Covariance, num_varying, varying_places
from bnncli.structures.row_space import WithinRows
from bnncli.system import signals
from bnncli.targets.network import pairs_at_once
from bnncli.targets.row_space import RowSpace
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget


CENTERS = ("mode", "checkpoint")
MOST_MODEL_ERROR = 0.5  # nats, of a quadratic model at its own maximum; the evidence is off by about as much


@dataclass(frozen=True)
class LaplaceFit:
    """A fitted Gaussian.

    Args:
        gaussian: the posterior.
        mode: accuracy of the centre; None if centred on the checkpoint.
        log_joint: at the centre, nats.
        log_marginal_likelihood: Laplace estimate of log p(D), nats; None if invalid.
        hessian: of the summed negative log likelihood at the centre, without the prior, so that the prior can be
            changed.
        no_evidence: why log_marginal_likelihood is None.
    """

    gaussian: Gaussian
    mode: Mode | None
    log_joint: float
    log_marginal_likelihood: float | None
    hessian: dict[str, Tensor]
    no_evidence: str | None = None


def fit_gaussian(
    target: CurvedTarget,
    *,
    start: Tensor,
    structure: str = "full",
    center: str = "mode",
    hessian: dict[str, Tensor] | None = None,
    mode_hessian: dict[str, Tensor] | None = None,
    before: LocalCovariance | None = None,
    progress: Progress = SILENT,
) -> LaplaceFit:
    """Fit a Gaussian at the mode of a target, or at start, with covariance (H + Lambda)^{-1}.

    Args:
        target: the log posterior.
        start: (P,), the checkpoint's head.
        structure: of the covariance, one of the `covariances`.
        center: mode, or checkpoint for start itself.
        hessian: of this structure at start, if that is the centre; saves computing it.
        mode_hessian: a Hessian from near the mode, passed to find_suitable_mode.
        before: covariance for the same examples; saves computing what does not depend on theta; also passed to find_suitable_mode.
        progress: passed to find_suitable_mode.

    Raises:
        NumericError: no mode is found, or the precision is not positive definite.
        UsageError: there is no such structure.
    """
    if center not in CENTERS:
        raise ValueError(f"center: expected one of {', '.join(CENTERS)}; got {center!r}")
    mode = None
    theta = start.to(target.device).double()
    if center == "mode":
        mode = find_suitable_mode(target, theta, hessian=mode_hessian, before=before, progress=progress)
        theta, before, hessian = mode.theta, mode.before, None
    covariance, hessian, _ = covariance_at(target, theta, structure, hessian=hessian, before=before)
    gaussian = Gaussian(theta, covariance, target.layout, target.prior)
    if mode is not None:
        missing = 0.5 * mode.newton_decrement**2
        if missing > MOST_MODEL_ERROR:
            short = f"the log joint at the mode is about {missing:.3g} nats higher than at the end of the search"
            return LaplaceFit(gaussian, mode, mode.log_joint, None, hessian, short)
        log_varying = mode.log_joint - fixed_log_prior(target, theta, covariance)
        return LaplaceFit(gaussian, mode, mode.log_joint, laplace_evidence(log_varying, covariance), hessian)
    log_joint, evidence, reason = _evidence_beside_the_mode(target, theta, covariance)
    return LaplaceFit(gaussian, None, log_joint, evidence, hessian, reason)


def _evidence_beside_the_mode(
    target: CurvedTarget, theta: Tensor, covariance: Covariance
) -> tuple[float, float | None, str | None]:
    """Return the log joint at theta (P,), the log evidence of its second-order expansion there, and why it is None.

    With gradient g and precision H at theta, log Z = log p(D, theta) + g^T H^{-1} g / 2 + P / 2 log(2 pi) - log|H| / 2.
    This is as accurate as the quadratic model, which is checked at its own maximum, theta + H^{-1} g: the log joint
    there must match, and half the log determinant must be the same.
    """
    if not target.curvature(covariance.structure).is_exact:
        one = add_article(covariance.structure)
        log_joint = float(target.log_joint(theta.unsqueeze(0)))  # a float64 gradient took a third of a network's fit
        return log_joint, None, f"away from the mode it needs the exact Hessian, and {one} Hessian is not exact"
    value, gradient = target.log_joint_and_grad(theta.unsqueeze(0), dtype=torch.float64)
    log_joint = float(value)
    white = covariance.pull_back(gradient)
    rise = 0.5 * float(white.square().sum())
    maximum = theta + covariance.unwhiten(white)[0]
    reached = float(target.log_joint_and_grad(maximum.unsqueeze(0), dtype=torch.float64)[0])
    wrong = abs(reached - log_joint - rise)
    if wrong <= MOST_MODEL_ERROR:  # one more Hessian only if it can decide
        try:
            there = covariance_at(target, maximum, covariance.structure)[0]
        except NumericError:  # indefinite there: not a maximum
            wrong = math.inf
        else:
            wrong += abs(there.log_det_scale() - covariance.log_det_scale())
    if not wrong <= MOST_MODEL_ERROR:
        reason = f"the quadratic model at the checkpoint's weights is off by {wrong:.3g} nats at its own maximum"
        return log_joint, None, reason
    log_varying = log_joint - fixed_log_prior(target, theta, covariance)
    return log_joint, laplace_evidence(log_varying + rise, covariance), None


def laplace_evidence(log_joint: float, covariance: Covariance) -> float:
    """Return the Laplace estimate of the log marginal likelihood: log p(D, m) + N / 2 log(2 pi) + log|det L|, nats.

    Args:
        log_joint: of the N varying parameters: all, or those of a subnetwork, less `fixed_log_prior`.
    """
    return log_joint + 0.5 * num_varying(covariance) * math.log(2 * math.pi) + covariance.log_det_scale()


def fixed_log_prior(target: CurvedTarget, theta: Tensor, covariance: Covariance) -> float:
    """Return the prior log density of the entries of theta (P,) that a covariance fixes, nats; 0 if all vary."""
    places = varying_places(covariance)
    if places is None:
        return 0.0
    precisions = target.prior.diagonal(target.layout, device=theta.device)
    away = theta.double() - target.prior.center(target.layout, device=theta.device)
    terms = 0.5 * ((precisions / (2 * math.pi)).log() - precisions * away.square())
    return float(terms.sum() - terms[places].sum())


_STEP = 1e-3  # of a log precision, for central differences of the log determinant: relative error of a millionth


def num_effective(target: CurvedTarget, fit: LaplaceFit) -> float:
    """Return the effective number of parameters; negative only if an exact Hessian has negative curvature.

    Computed from the marginal variances if the covariance has them, else from the derivative of the log determinant
    with respect to the prior.

    Args:
        target: the log posterior of the fit; its own prior is ignored.
    """
    covariance, layout = fit.gaussian.covariance, fit.gaussian.layout
    prior = fit.gaussian.require_prior()
    marginal = getattr(covariance, "marginal_variances", None)
    if marginal is not None:
        variances, places = marginal().double(), varying_places(covariance)
        shares = prior.diagonal(layout, device=variances.device) * variances
        return num_varying(covariance) - float(shares.sum() if places is None else shares[places].sum())
    looser, tighter = (
        covariance_at(
            target.with_prior(prior.times(math.exp(step))), fit.gaussian.mean, covariance.structure, hessian=fit.hessian
        ).covariance.log_det_scale()
        for step in (-_STEP, _STEP)
    )
    return num_varying(covariance) - (looser - tighter) / _STEP


@dataclass(frozen=True)
class RowLift:
    """Map from theta inside the span of the features to all of theta, for prior_criterion.Lift.

    Args:
        rows: the span.
        prior: over all of theta; its mean centres the part outside the span.
    """

    rows: RowSpace
    prior: Prior

    @property
    def layout(self) -> HeadLayout:
        """Layout of all of theta."""
        return self.rows.layout

    def theta(self, theta: Tensor) -> Tensor:
        """Return theta (..., P) with the prior's mean outside the span, from theta inside it."""
        return self.rows.lift_about(theta, self.prior)

    def covariance(self, covariance: Covariance, prior: Prior) -> WithinRows:
        """Return the covariance over all of theta: the prior's outside the span."""
        return WithinRows(covariance, self.rows, prior.weight_precision)


def lift_gaussian(gaussian: Gaussian, lift: RowLift) -> Gaussian:
    """Extend a Gaussian over theta inside the span of the features to all of theta: outside it is the prior."""
    prior = replace(gaussian.require_prior(), mean=lift.prior.mean)
    return Gaussian(lift.theta(gaussian.mean), lift.covariance(gaussian.covariance, prior), lift.layout, prior)


def lift_fit(fit: LaplaceFit, lift: RowLift) -> LaplaceFit:
    """Extend a fit of `rows.target` to all of theta; exact at the mode.

    The evidence and the Hessian (in coordinates of the span) do not change, since outside the span posterior and prior
    agree. The log joint gains the prior density outside the span at its mean.
    """
    gaussian = lift_gaussian(fit.gaussian, lift)
    constant = 0.5 * lift.rows.num_outside * math.log(gaussian.require_prior().weight_precision / (2 * math.pi))
    mode = None
    if fit.mode is not None:
        mode = replace(fit.mode, theta=gaussian.mean, log_joint=fit.mode.log_joint + constant)
    return replace(fit, gaussian=gaussian, mode=mode, log_joint=fit.log_joint + constant)


def complete_draws(theta: Tensor, generator: torch.Generator, *, rows: RowSpace, prior: Prior) -> tuple[Tensor, Tensor]:
    """Return all of theta (S, P) for draws (S, K (r + 1)) inside the span, and the log prior density of the rest, (S,).

    Args:
        generator: random generator of the rest.
        rows: the span.
        prior: of all of theta; isotropic over the weights.
    """
    noise = standard_normal(theta.shape[0], rows.layout.num_params, generator, theta.device).to(theta)
    weight, bias = rows.layout.split(noise)
    nothing = None if bias is None else torch.zeros_like(bias)
    noise = rows.layout.join(weight, nothing)
    outside = noise - rows.lift(rows.reduce(noise))
    precision = prior.weight_precision
    constant = 0.5 * rows.num_outside * math.log(precision / (2 * math.pi))
    return rows.lift_about(theta, prior) + outside * precision**-0.5, constant - 0.5 * outside.double().square().sum(
        dim=1
    )


TOLERANCE = 1e-2  # relative residual of a draw: an error of a few hundredths of a standard deviation
MOST_STEPS = 1000
_FEWEST = 64  # examples at once, below which vectors are processed one after the other
# PyTorch draws CPU normals in groups of sixteen: blocks of a multiple of sixteen examples get the numbers of one call.
_SIXTEEN = 16


class Solutions(NamedTuple):
    """Solutions of (H + Lambda) d = b.

    Args:
        values: d (S, P) float64.
        num_steps: conjugate gradient steps, one product each.
        residual: largest relative residual of the draws, in the norm of the whitening Gaussian.
    """

    values: Tensor
    num_steps: int
    residual: float

    @property
    def num_passes(self) -> int:
        """Passes over the data: for the right sides, each step, and the final residual."""
        return self.num_steps + 2


def linear_draws(
    target: NetworkTarget,
    theta: Tensor,
    whitening: Covariance,
    *,
    num_draws: int,
    generator: torch.Generator,
    tolerance: float = TOLERANCE,
    progress: Progress = SILENT,
) -> Solutions:
    """Draw deviations from theta (P,) of N(theta, (H + Lambda)^{-1}), with H the Gauss-Newton matrix at theta.

    Args:
        target: its prior has precision Lambda.
        whitening: preconditioner, close to that covariance; the closer, the fewer passes.
        num_draws: S.
        generator: CPU generator of the right sides.
        tolerance: of the relative residuals.
        progress: advances once per step.

    Raises:
        NumericError: the residuals do not reach the tolerance.
    """

    def normals(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    sides = right_sides(target, theta, num_draws, normals)
    return solve(precision_operator(target, theta), sides, whitening, tolerance=tolerance, progress=progress)


def right_sides(target: NetworkTarget, theta: Tensor, num_draws: int, normals: Callable[..., Tensor]) -> Tensor:
    """Return b (S, P) float64, linear in standard normals: (S, P) for the prior, then (n, S, M) per block of examples."""
    theta = theta.to(target.device, target.dtype)
    precisions = target.prior.diagonal(target.layout, device=target.device)
    total = normals(num_draws, len(theta)).to(target.device) * precisions.sqrt()
    size = max(_SIXTEEN, target.rows_at_once(num_draws, theta.dtype) // _SIXTEEN * _SIXTEEN)
    for begin in range(0, target.num_examples, size):
        signals.raise_if_interrupted("the draws")
        rows = slice(begin, min(begin + size, target.num_examples))
        inputs = target.inputs[rows].to(target.device)
        with torch.enable_grad():
            logits, pull = torch.func.vjp(
                lambda one, inputs=inputs: target.layout.logits(inputs, one.unsqueeze(0))[0], theta
            )[:2]
        probs = target.likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1][:, 0]
        root = target.likelihood.hessian_root(probs)
        noise = normals(logits.shape[0], num_draws, root.shape[1]).to(root)
        slopes = torch.einsum("kmn,nsm->snk", root, noise)
        total += torch.func.vmap(lambda one, pull=pull: pull(one)[0])(slopes).double() * target.likelihood_scale**0.5
    return total


def precision_operator(target: NetworkTarget, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function (S, P) -> (S, P) float64 that multiplies by H + Lambda at theta (P,), all vectors in one pass."""
    theta = theta.to(target.device, target.dtype)
    pairs = pairs_at_once(target.layout, target.device, theta.dtype)
    most = max(1, pairs // min(_FEWEST, target.num_examples))  # vectors at once

    def multiply(vectors: Tensor) -> Tensor:
        total = -target.prior.curvature_times(vectors, target.layout)
        for some, part in zip(vectors.to(theta).split(most), total.split(most), strict=True):
            for rows in target.row_blocks(len(some), theta.dtype):
                part += _product(target, theta, some, rows).double() * target.likelihood_scale
        return total

    return multiply


def _product(target: NetworkTarget, theta: Tensor, vectors: Tensor, rows: slice) -> Tensor:
    """Return sum_n J_n^T H_n J_n v over the examples in `rows`, (S, P), for vectors (S, P)."""
    inputs = target.inputs[rows].to(target.device)
    with torch.enable_grad():
        logits, pull = torch.func.vjp(lambda one: target.layout.logits(inputs, one.unsqueeze(0))[0], theta)[:2]
    probs = target.likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1]
    pushed = target.layout.push(inputs, theta, vectors).permute(2, 0, 1).contiguous()
    weighted = target.likelihood.hessian_product_(probs, pushed).permute(1, 2, 0)
    return torch.func.vmap(lambda one: pull(one)[0])(weighted)


def solve(
    multiply: Callable[[Tensor], Tensor],
    sides: Tensor,
    whitening: Covariance,
    *,
    tolerance: float = TOLERANCE,
    progress: Progress = SILENT,
) -> Solutions:
    """Solve A d = b for all right sides b (S, P) at once; converged ones take no more products.

    Args:
        multiply: multiplies rows (S, P) by A (P, P), positive definite, float64.
        whitening: Sigma, close to A^{-1}; residual norms are r^T Sigma r.

    Raises:
        NumericError: the residuals do not reach the tolerance.
    """
    task = progress.task("conjugate gradients", MOST_STEPS)
    found = torch.zeros_like(sides)
    residual = sides.clone()
    white = _times(whitening, residual)
    first = length = (residual * white).sum(dim=1)
    direction = white.clone()
    num_steps = 0
    while True:
        active = (length > tolerance**2 * first).nonzero()[:, 0]
        if not len(active) or num_steps == MOST_STEPS or not bool(torch.isfinite(length).all()):
            break
        signals.raise_if_interrupted("the draws")
        some = direction[active]
        product = multiply(some)
        step = (length[active] / (some * product).sum(dim=1)).unsqueeze(1)
        found[active] += step * some
        residual[active] -= step * product
        white = _times(whitening, residual[active])
        before, length = length, length.index_copy(0, active, (residual[active] * white).sum(dim=1))
        direction[active] = white + (length / before)[active].unsqueeze(1) * some
        num_steps += 1
        task.advance(note=f"residual {float((length / first).max().sqrt()):.2g}")
    residual = sides - multiply(found)  # the true residual, without the rounding that the steps accumulate
    left = float(((residual * _times(whitening, residual)).sum(dim=1) / first).max().sqrt())
    if not left <= 2 * tolerance:
        raise NumericError(
            f"conjugate gradients left residuals of {left:.2g} after {num_steps} steps; expected at most {tolerance:g}",
            hint="use a larger \0prior_precision\0, or a \0structure\0 closer to full",
        )
    return Solutions(found, num_steps, left)


def _times(covariance: Covariance, rows: Tensor) -> Tensor:
    """Return r Sigma for rows r (S, P)."""
    return covariance.unwhiten(covariance.pull_back(rows))
