"""Logits under a Kronecker-factored covariance: independent along the eigenvectors of the output factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances import Covariance
from bnncli.covariances._eigenbasis import InEigenbasis
from bnncli.covariances._layers import InLayers
from bnncli.covariances.kron import Kron
from bnncli.logits import LogitCovariance, LogitRoot
from bnncli.logits._by_layer import (
    BlockRoot,
    Blocks,
    MatrixDerivatives,
    Turned,
    consecutive_places,
    turned,
    weighted_root,
)
from bnncli.logits.block import PulledBlock
from bnncli.parameters.layouts import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor


def of_head(covariance: Kron, layout: HeadLayout) -> LogitCovariance:
    """Return U diag(v) U^T, with v the variances along U."""
    return AlongOutputBasis(covariance, layout)


@dataclass(frozen=True)
class AlongOutputBasis:
    """U diag(v) U^T, O(F^2 + F K + K^2) per example.

    Args:
        theta_covariance: its output factor has the eigenvectors U.
        layout: of theta.
    """

    theta_covariance: Kron
    layout: HeadLayout
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of U diag(v) U^T, (n, K)."""
        return (self._along_basis(inputs) @ self._basis.square().T).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P U diag(v) U^T P, (n, K); centres the columns of U, so that nothing cancels."""
        projected = (self._basis - self._basis.mean(dim=0)).square()
        return (self._along_basis(inputs) @ projected.T).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return U diag(v) U^T, (n, K, K)."""
        variances = self._along_basis(inputs)
        out = (self._basis * variances.unsqueeze(1)) @ self._basis.T
        return out.to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return U diag(sqrt(v)), without K^2 numbers per example."""
        return LogitRoot(self._along_basis(inputs).sqrt(), self._basis).to(inputs)

    @property
    def _basis(self) -> Tensor:
        """U (K, K)."""
        return self.theta_covariance.output_basis

    def _along_basis(self, features: Tensor) -> Tensor:
        """Return v (n, K)."""
        sigma = self.theta_covariance
        augmented = self.layout.augment_features(features).to(sigma.feature_basis)
        if sigma.bias_unit != 1:
            augmented[:, -1] *= sigma.bias_unit
        projected = augmented @ sigma.feature_basis
        return projected.square() @ sigma.scales.square().T


def blocks_of(covariance: InLayers) -> Blocks:
    """Return one block per layer, in the bases of its factors."""

    def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
        own = consecutive_places(covariance.pieces)
        return [(place, _block_of(piece)) for place, piece in zip(own, covariance.pieces, strict=True)]

    return blocks


def _block_of(piece: Covariance) -> BlockRoot:
    return TurnedBlock(piece) if isinstance(piece, InEigenbasis) else PulledBlock(piece)


@dataclass(frozen=True)
class TurnedBlock:
    """A block whose curvature is diagonal in a Kronecker product of bases.

    Args:
        covariance: inverse of the curvature plus the prior.
    """

    num_copies: ClassVar[int] = 3  # the Jacobian and its float64 image
    covariance: InEigenbasis

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times L."""
        return PulledBlock(self.covariance).of_rows(rows)

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian in the bases, transforming output gradients and inputs rather than their products."""
        return turned(*layer.in_bases(self.covariance.output_basis, self.covariance.feature_basis))

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the Jacobian times standard deviations if the coordinates in the bases are independent, else times L."""
        sigma = self.covariance
        if sigma.variances is None:
            return sigma.pull_back_turned(turned.whole()).flatten(2)
        return weighted_root(turned, sigma.variances)

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the bases are the same tensors."""
        own = self.covariance
        return isinstance(other, TurnedBlock) and (
            other.covariance.output_basis is own.output_basis and other.covariance.feature_basis is own.feature_basis
        )


network_root = TurnedBlock  # kind of block for a layer's Jacobian
