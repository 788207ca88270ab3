"""The logits of a last linear layer, which are linear in theta: their Gaussian is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.covariances._row_space import rows_of
from bnncli.logits import LogitCovariance, LogitGaussian, LogitRoot
from bnncli.logits._pulled import Pulled
from bnncli.logits._row_space import SpreadInRows
from bnncli.theta.head import HeadLayout


def head_logits(theta: Tensor, layout: HeadLayout, covariance: Covariance | None = None) -> LogitGaussian:
    """The Gaussian of the logits of features (n, D), for theta (P,) of this covariance; of no spread without one."""

    def mean(features: Tensor) -> Tensor:
        return layout.logits(features, theta.to(features.dtype).unsqueeze(0))[0]

    return LogitGaussian(mean, NoSpread(layout.num_outputs) if covariance is None else head_spread(covariance, layout))


def head_spread(covariance: Covariance, layout: HeadLayout) -> LogitCovariance:
    """The covariance of the logits of features (n, D): the short way of the structure where it has one."""
    within = rows_of(covariance)
    if within is not None:
        return SpreadInRows(head_spread(within.inner, within.rows.reduced), within.rows, within.precision)
    if covariance.structure not in registry.names("logits"):
        return Pulled(covariance, lambda features: head_jacobian(features, layout))
    spread: LogitCovariance = registry.load_module("logits", covariance.structure).of_head(covariance, layout)
    return spread


def head_jacobian(features: Tensor, layout: HeadLayout) -> Tensor:
    """The logits' derivatives by theta, (n, K, P), at features (n, D): an output's parameters move that output alone."""
    outputs = torch.eye(layout.num_outputs, dtype=features.dtype, device=features.device)
    rows = outputs.unsqueeze(2) * layout.augment_features(features)[:, None, None]
    return layout.flatten(rows)


@dataclass(frozen=True)
class NoSpread:
    """Of one theta: logits are certain.

    Args:
        num_outputs: K.
    """

    num_outputs: int
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K)."""
        return self.variance(inputs)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs, self.num_outputs)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Standard deviations, zero."""
        return LogitRoot(self.variance(inputs))
