"""Map targets, Gaussians, fits and draws between the span of the features and all of theta, where the rest is the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.inference.laplace import LaplaceFit
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance
from bnncli.structures.row_space import WithinRows, rows_of
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor


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


def reduce_gaussian(gaussian: Gaussian) -> Gaussian:
    """Return the Gaussian over theta inside the span, or the Gaussian itself if it was fitted to all of theta."""
    within = rows_of(gaussian.covariance)
    if within is None:
        return gaussian
    rows = within.rows
    return Gaussian(rows.reduce(gaussian.mean), within.inner, rows.reduced, rows.prior(gaussian.require_prior()))


def reduce_target(target: LastLayerTarget, gaussian: Gaussian) -> LastLayerTarget:
    """Return the target over theta inside the span, or the target itself if the Gaussian was fitted to all of theta."""
    within = rows_of(gaussian.covariance)
    return target if within is None else within.rows.target(target)


def replace_outside(gaussian: Gaussian, prior: Prior) -> Gaussian:
    """Return a Gaussian of a span with this prior outside, where the posterior equals the prior of its target."""
    within = rows_of(gaussian.covariance)
    if within is None:
        return gaussian
    mean = within.rows.lift_about(within.rows.reduce(gaussian.mean), prior)
    return replace(gaussian, mean=mean, covariance=replace(within, precision=prior.weight_precision))
