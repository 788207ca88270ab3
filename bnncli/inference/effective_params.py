"""The effective number of parameters: of how many directions the data, not the prior, say where they lie.

tr(H (H + Lambda)^{-1}) = N - tr(Lambda Sigma), between 0 and the number N of parameters that vary (MacKay 1992, "Bayesian
interpolation", Neural Computation 4(3), eq. (4.9)). Near 0 the posterior is the prior about another centre.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.covariances import num_varying, varying_places
from bnncli.inference.local_covariance import covariance_at

if TYPE_CHECKING:
    from bnncli.inference.laplace import LaplaceFit
    from bnncli.targets.target import CurvedTarget

_STEP = 1e-3  # of a log precision, for differences of the log determinant: central, so wrong by a millionth


def num_effective(target: CurvedTarget, fit: LaplaceFit) -> float:
    """The effective number of parameters of a Gaussian; below 0 only where an exact Hessian has negative curvature.

    Of the marginal variances where its covariance knows them, else of how its log determinant changes with the prior.

    Args:
        target: the log posterior that was fitted to; its own prior is ignored.
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
