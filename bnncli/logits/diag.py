"""Logits under a diagonal covariance: sums of squared features times variances, O(K F) an example."""

from __future__ import annotations

from torch import Tensor

from bnncli.covariances.diag import Diag
from bnncli.logits import LogitCovariance
from bnncli.logits._independent import Independent
from bnncli.theta.head import HeadLayout


def of_head(covariance: Diag, layout: HeadLayout) -> LogitCovariance:
    """Independent logits with the variances x^2 . sigma_k^2."""
    variances = covariance.variances

    def variance(features: Tensor) -> Tensor:
        squares = layout.augment_features(features).to(variances).square()
        return (squares @ layout.augment(variances).T).to(features.dtype)

    return Independent(variance)
