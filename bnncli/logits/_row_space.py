"""Logits under a posterior fitted in the row space of the features: the inner covariance plus the prior's outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.logits import LogitCovariance, LogitRoot, root_of_covariances
from bnncli.targets.blocks import slices
from bnncli.targets.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor

_FEATURE_ELEMENTS = {
    "cpu": 2**25,
    "cuda": 2**27,
}  # numbers in a block of examples in float64; large, because each block costs the inner covariance a pass


@dataclass(frozen=True)
class SpreadInRows:
    """The inner covariance at Phi Q, plus the squared norm of the remainder divided by the precision, for each output.

    Args:
        inner: covariance of the logits, given coordinates in the span.
        rows: the span.
        precision: prior precision of each weight outside the span.
    """

    inner: LogitCovariance
    rows: RowSpace
    precision: float

    @property
    def is_dense(self) -> bool:
        """Return whether the inner covariance is dense."""
        return self.inner.is_dense

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each logit, (n, K)."""
        parts = [self.inner.variance(at) + rest.unsqueeze(1) for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P S P, (n, K)."""
        share = 1 - 1 / self.rows.layout.num_outputs
        parts = [self.inner.projected_variance(at) + share * rest[:, None] for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return the covariances, (n, K, K); the remainder is independent across outputs."""
        return torch.cat(list(self._covariances(inputs))).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots in the form of the inner ones, because the added term is a multiple of the identity."""
        if self.inner.is_dense:
            return root_of_covariances(torch.cat(list(self._covariances(inputs)))).to(inputs)
        roots = [(self.inner.root(at), rest) for at, rest in self._divided(inputs)]
        scales = [(root.scale.square() + rest.unsqueeze(1)).sqrt() for root, rest in roots]
        return LogitRoot(torch.cat(scales), roots[0][0].basis).to(inputs)

    def _divided(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for blocks of examples, the coordinates in the span, (n, r), and the variance of the remainder, (n,)."""
        size = max(1, _FEATURE_ELEMENTS.get(features.device.type, 2**25) // self.rows.layout.num_features)
        for some in slices(0, max(1, features.shape[0]), size):
            block = features[some]
            yield self.rows.coordinates(block), self.rows.outside(block) / self.precision

    def _covariances(self, features: Tensor) -> Iterator[Tensor]:
        """Yield covariances (n, K, K) of blocks of examples, in the precision of the basis."""
        for at, rest in self._divided(features):
            covariance = self.inner.covariance(at)
            covariance.diagonal(dim1=1, dim2=2).add_(rest.unsqueeze(1))
            yield covariance
