"""The logits of a last linear layer: linear in theta, so their covariance is exact; structures have fast paths."""

from __future__ import annotations

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.covariances._row_space import rows_of
from bnncli.logits import LogitCovariance
from bnncli.logits._pulled import pulled
from bnncli.logits._row_space import SpreadInRows
from bnncli.parameters.layouts import HeadLayout


def head_spread(covariance: Covariance, layout: HeadLayout) -> LogitCovariance:
    """Return the covariance of the logits of features (n, D), for any theta, by the structure's fast path if any."""
    within = rows_of(covariance)
    if within is not None:
        return SpreadInRows(head_spread(within.inner, within.rows.reduced), within.rows, within.precision)
    if covariance.structure not in registry.names("logits"):
        return pulled(covariance, layout.jacobian)
    spread: LogitCovariance = registry.load_module("logits", covariance.structure).of_head(covariance, layout)
    return spread
