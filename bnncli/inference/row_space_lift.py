"""Gaussians over theta inside the span of the features, as the Gaussians over all of theta that they stand for.

What lies outside the span has its prior for its posterior: targets/row_space.py says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.covariances import Covariance
from bnncli.covariances._row_space import WithinRows
from bnncli.inference.laplace import LaplaceFit
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.row_space import RowSpace
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RowLift:
    """From theta inside the span to all of theta, for prior_criterion.Lift.

    Args:
        rows: the span.
        prior: over all of theta, whose mean centres have outside the span.
    """

    rows: RowSpace
    prior: Prior

    @property
    def layout(self) -> HeadLayout:
        """Of all of theta."""
        return self.rows.layout

    def theta(self, theta: Tensor) -> Tensor:
        """theta (..., P) with the prior's mean outside the span, from theta inside it."""
        return self.rows.lift_about(theta, self.prior)

    def covariance(self, covariance: Covariance, prior: Prior) -> WithinRows:
        """The covariance over all of theta: the prior's outside the span."""
        return WithinRows(covariance, self.rows, prior.weight_precision)


def lift_gaussian(gaussian: Gaussian, lift: RowLift) -> Gaussian:
    """The Gaussian over all of theta, of one over theta inside the span of the features: outside it is the prior."""
    prior = replace(gaussian.require_prior(), mean=lift.prior.mean)
    return Gaussian(lift.theta(gaussian.mean), lift.covariance(gaussian.covariance, prior), lift.layout, prior)


def lift_fit(fit: LaplaceFit, lift: RowLift) -> LaplaceFit:
    """The fit over all of theta, of one of `rows.target`: exact at the mode.

    The evidence is the same: what lies outside the span has its prior for its posterior, and adds nothing. So is the
    Hessian, in the coordinates of the span. The log joint gains the prior's density outside it, at its mean.
    """
    gaussian = lift_gaussian(fit.gaussian, lift)
    constant = 0.5 * lift.rows.num_outside * math.log(gaussian.require_prior().weight_precision / (2 * math.pi))
    mode = None
    if fit.mode is not None:
        mode = replace(fit.mode, theta=gaussian.mean, log_joint=fit.mode.log_joint + constant)
    return replace(fit, gaussian=gaussian, mode=mode, log_joint=fit.log_joint + constant)
