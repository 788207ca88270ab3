"""Logits under a block covariance: |L_k^T x|^2 of each output, O(K F^2) an example."""

from __future__ import annotations

from torch import Tensor

from bnncli.covariances.block import Block
from bnncli.logits import LogitCovariance
from bnncli.logits._independent import Independent
from bnncli.targets.grams import tiles
from bnncli.theta.head import HeadLayout


def of_head(covariance: Block, layout: HeadLayout) -> LogitCovariance:
    """Independent logits."""
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
