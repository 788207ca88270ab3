"""Logits under a block covariance: |L^T x|^2 for each output of a last layer, |L^T J|^2 for each layer of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances import Covariance
from bnncli.covariances._layers import InLayers
from bnncli.covariances.block import Block
from bnncli.logits import LogitCovariance
from bnncli.logits._by_layer import BlockRoot, Blocks, MatrixDerivatives, Turned, consecutive_places
from bnncli.logits._independent import Independent
from bnncli.parameters.layouts import HeadLayout
from bnncli.targets.grams import tiles

if TYPE_CHECKING:
    from torch import Tensor


def of_head(covariance: Block, layout: HeadLayout) -> LogitCovariance:
    """Return independent logits, O(K F^2) per example."""
    scale_tril = covariance.scale_tril
    num_outputs, size = scale_tril.shape[:2]

    def variance(features: Tensor) -> Tensor:
        augmented = layout.augment_features(features).to(scale_tril)
        variances = augmented.new_empty(len(augmented), num_outputs)
        for rows, outputs in tiles(augmented, num_outputs):
            roots = scale_tril[outputs].transpose(0, 1).reshape(size, -1)
            variances[rows, outputs] = (augmented[rows] @ roots).unflatten(1, (-1, size)).square().sum(dim=2)
        return variances.to(features.dtype)

    return Independent(variance)


def blocks_of(covariance: InLayers) -> Blocks:
    """Return one block per layer."""

    def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
        own = consecutive_places(covariance.pieces)
        return [(place, PulledBlock(piece)) for place, piece in zip(own, covariance.pieces, strict=True)]

    return blocks


@dataclass(frozen=True)
class PulledBlock:
    """A block known only through L.

    Args:
        covariance: L L^T.
    """

    # the Jacobian and four float64 copies: the input of L, an intermediate and the output
    num_copies: ClassVar[int] = 9
    covariance: Covariance

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times L."""
        return self.covariance.pull_back(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian as rows, without bases."""
        return Turned(layer.rows().unsqueeze(2), None)

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the rows times L."""
        return self.of_rows(turned.slopes[:, :, 0])

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the other block takes rows as well."""
        return isinstance(other, PulledBlock)
