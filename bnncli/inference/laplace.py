"""The Laplace approximation: a Gaussian with the curvature of the log posterior.

MacKay (1992), Neural Computation 4(3); for networks Daxberger et al. (2021), arXiv:2106.14806. Centred on the exact mode
of the target; on the network's own weights as those papers have it, when asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.covariances import Covariance, num_varying, varying_places
from bnncli.errors import NumericError
from bnncli.inference.local_covariance import LocalCovariance, covariance_at
from bnncli.inference.mode import Mode
from bnncli.inference.modes import mode_of
from bnncli.lazy import torch
from bnncli.names import with_article
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

CENTERS = ("mode", "checkpoint")
MOST_MODEL_ERROR = 0.5  # nats, of a quadratic model at its own maximum; the evidence is wrong by about as much


@dataclass(frozen=True)
class LaplaceFit:
    """A fitted Gaussian.

    Args:
        gaussian: the posterior.
        mode: how exact the centre is; None when centred on the checkpoint.
        log_joint: at the centre, nats.
        log_marginal_likelihood: the Gaussian's estimate of log p(D), nats; None where it would be no estimate.
        hessian: of the summed negative log likelihood at the centre, without the prior: the prior can be changed.
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
    """The Gaussian at the mode of target, or at start, with covariance (H + Lambda)^{-1}.

    Args:
        target: the log posterior.
        start: (P,), the checkpoint's head.
        structure: of the covariance, one of the `covariances`.
        center: mode, or checkpoint for start itself.
        hessian: of this structure at start, where that is the centre: saves making it.
        mode_hessian: passed to mode_of, a Hessian from near the mode.
        before: of the same examples, saves what no theta changes; passed to mode_of as well.
        progress: passed to mode_of.

    Raises:
        NumericError: when there is no mode to be found or the precision is not positive definite.
        UsageError: when there is no such structure.
    """
    if center not in CENTERS:
        raise ValueError(f"center: expected one of {', '.join(CENTERS)}; got {center!r}")
    mode = None
    theta = start.to(target.device).double()
    if center == "mode":
        mode = mode_of(target, theta, hessian=mode_hessian, before=before, progress=progress)
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
    """The log joint at theta (P,), the log evidence of its second-order expansion there, and why there is none.

    With gradient g and precision H at theta, log Z = log p(D, theta) + g^T H^{-1} g / 2 + P / 2 log(2 pi) - log|H| / 2. It is
    as good as the quadratic model, which is held to what it promises at its own maximum, theta + H^{-1} g: the log joint
    there, and half the log determinant, which is to be the same.
    """
    if not target.curvature(covariance.structure).is_exact:
        one = with_article(covariance.structure)
        log_joint = float(
            target.log_joint(theta.unsqueeze(0))
        )  # its gradient in float64 took a third of a network's fit
        return log_joint, None, f"away from the mode it needs the exact Hessian, and {one} Hessian is not exact"
    value, gradient = target.log_joint_and_grad(theta.unsqueeze(0), dtype=torch.float64)
    log_joint = float(value)
    white = covariance.pull_back(gradient)
    rise = 0.5 * float(white.square().sum())
    maximum = theta + covariance.unwhiten(white)[0]
    reached = float(target.log_joint_and_grad(maximum.unsqueeze(0), dtype=torch.float64)[0])
    wrong = abs(reached - log_joint - rise)
    if wrong <= MOST_MODEL_ERROR:  # a Hessian more only where it may decide
        try:
            there = covariance_at(target, maximum, covariance.structure)[0]
        except NumericError:  # indefinite there: no maximum
            wrong = math.inf
        else:
            wrong += abs(there.log_det_scale() - covariance.log_det_scale())
    if not wrong <= MOST_MODEL_ERROR:
        reason = f"the quadratic model at the checkpoint's weights is off by {wrong:.3g} nats at its own maximum"
        return log_joint, None, reason
    log_varying = log_joint - fixed_log_prior(target, theta, covariance)
    return log_joint, laplace_evidence(log_varying + rise, covariance), None


def laplace_evidence(log_joint: float, covariance: Covariance) -> float:
    """Laplace's estimate of the log marginal likelihood: log p(D, m) + N / 2 log(2 pi) + log|det L|, nats.

    Args:
        log_joint: of the N parameters that vary, all of them but for a subnetwork: less `fixed_log_prior`.
    """
    return log_joint + 0.5 * num_varying(covariance) * math.log(2 * math.pi) + covariance.log_det_scale()


def fixed_log_prior(target: CurvedTarget, theta: Tensor, covariance: Covariance) -> float:
    """The prior's log density of those of theta (P,) that a covariance fixes, nats: no part of the others' model. 0 where all vary."""
    places = varying_places(covariance)
    if places is None:
        return 0.0
    precisions = target.prior.diagonal(target.layout, device=theta.device)
    away = theta.double() - target.prior.center(target.layout, device=theta.device)
    terms = 0.5 * ((precisions / (2 * math.pi)).log() - precisions * away.square())
    return float(terms.sum() - terms[places].sum())
