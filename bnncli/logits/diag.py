"""Logits under a diagonal covariance: sums of squared features, or derivatives, times variances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bnncli.covariances.diag import Diag
from bnncli.logits import LogitCovariance
from bnncli.logits._by_layer import BlockRoot, MatrixDerivatives, by_layer, weighted_root
from bnncli.logits._independent import Independent
from bnncli.theta.head import HeadLayout
from bnncli.theta.module import ModuleLayout


def of_head(covariance: Diag, layout: HeadLayout) -> LogitCovariance:
    """Independent logits with the variances x^2 . sigma_k^2, O(K F) an example."""
    variances = covariance.variances

    def variance(features: Tensor) -> Tensor:
        squares = layout.augment_features(features).to(variances).square()
        return (squares @ layout.augment(variances).T).to(features.dtype)

    return Independent(variance)


def of_network(covariance: Diag, layout: ModuleLayout, theta: Tensor) -> LogitCovariance:
    """sum_p J_p^2 sigma_p^2, a layer at a time."""

    def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
        return [(place, Scaled(covariance.variances[place])) for place in places]

    return by_layer(layout, theta, blocks)


@dataclass(frozen=True)
class Scaled:
    """A diagonal block.

    Args:
        variances: (p,).
    """

    variances: Tensor

    def of_rows(self, rows: Tensor) -> Tensor:
        """Derivatives (n, K, p) times standard deviations."""
        return rows * self.variances.sqrt().to(rows)

    def of_matrix(self, layer: MatrixDerivatives) -> Tensor:
        """The same of a matrix (outputs, F), the bias last."""
        slopes, columns = layer.in_bases()
        shape = slopes.shape[2], columns.shape[1] - layer.has_bias
        matrix = HeadLayout(*shape, has_bias=layer.has_bias).augment(self.variances)
        return weighted_root(slopes, columns, matrix)
