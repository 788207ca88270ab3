"""Logits under a diagonal covariance: squared features, or squared Jacobians, times variances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances.diag import Diag
from bnncli.logits import LogitCovariance
from bnncli.logits._by_layer import BlockRoot, Blocks, MatrixDerivatives, Turned, turned, weighted_root
from bnncli.logits._independent import Independent
from bnncli.parameters.layouts import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor


def of_head(covariance: Diag, layout: HeadLayout) -> LogitCovariance:
    """Return independent logits with variances x^2 . sigma_k^2, O(K F) per example."""
    variances = covariance.variances

    def variance(features: Tensor) -> Tensor:
        squares = layout.augment_features(features).to(variances).square()
        return (squares @ layout.augment(variances).T).to(features.dtype)

    return Independent(variance)


def blocks_of(covariance: Diag) -> Blocks:
    """Return one diagonal block per layer: sum_p J_p^2 sigma_p^2."""

    def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
        return [(place, Scaled(covariance.variances[place])) for place in places]

    return blocks


@dataclass(frozen=True)
class Scaled:
    """A diagonal block.

    Args:
        variances: (p,).
    """

    num_copies: ClassVar[int] = 3  # the Jacobian and its float64 image
    variances: Tensor

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times standard deviations."""
        return rows * self.variances.sqrt().to(rows)

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian as it is, with a bias as last column."""
        return turned(*layer.in_bases(), has_bias=layer.has_bias)

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the Jacobian in a matrix (outputs, F) times standard deviations."""
        num_outputs = turned.slopes.shape[2]
        has_bias = turned.has_bias
        layout = HeadLayout(num_outputs, len(self.variances) // num_outputs - has_bias, has_bias=has_bias)
        return weighted_root(turned, layout.augment(self.variances))

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the other block is diagonal."""
        return isinstance(other, Scaled)


network_root = Scaled  # kind of block for a layer's Jacobian
