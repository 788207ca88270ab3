"""The Laplace approximation: a Gaussian with the curvature of the log posterior at its mode.

Includes the evidence and the effective number of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.errors import NumericError
from bnncli.inference.mode import LocalCovariance, Mode, covariance_at, find_suitable_mode
from bnncli.lazy import torch
from bnncli.names import add_article
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.structures import Covariance, num_varying, varying_places
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor


CENTERS = ("mode", "checkpoint")


MOST_MODEL_ERROR = 0.5  # nats, of a quadratic model at its own maximum; the evidence is off by about as much


@dataclass(frozen=True)
class LaplaceFit:
    """A fitted Gaussian.

    Args:
        gaussian: the posterior.
        mode: accuracy of the centre; None if centred on the checkpoint.
        log_joint: at the centre, nats; NaN about a checkpoint where the Hessian is not exact, and the evidence undefined.
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
        return math.nan, None, f"away from the mode it needs the exact Hessian, and {one} Hessian is not exact"
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
