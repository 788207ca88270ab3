"""Logits under a posterior that was fitted in the row space of the features: what lies inside, and the prior's outside."""

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
}  # of a block of examples in float64: large, each costs the inner one a pass


@dataclass(frozen=True)
class SpreadInRows:
    """The inner covariance at Phi Q, plus the squared length of the rest over the precision for each output.

    Args:
        inner: of the logits of coordinates in the span.
        rows: the span.
        precision: of the prior of each weight outside it.
    """

    inner: LogitCovariance
    rows: RowSpace
    precision: float

    @property
    def is_dense(self) -> bool:
        """As the inner one."""
        return self.inner.is_dense

    def variance(self, inputs: Tensor) -> Tensor:
        """Of each logit, (n, K)."""
        parts = [self.inner.variance(at) + rest.unsqueeze(1) for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of P S P, (n, K)."""
        share = 1 - 1 / self.rows.layout.num_outputs
        parts = [self.inner.projected_variance(at) + share * rest[:, None] for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Of all pairs, (n, K, K): the rest is independent over the outputs."""
        return torch.cat(list(self._covariances(inputs))).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Roots of the covariances, of the inner ones' form: what is added is a multiple of the identity."""
        if self.inner.is_dense:
            return root_of_covariances(torch.cat(list(self._covariances(inputs)))).to(inputs)
        roots = [(self.inner.root(at), rest) for at, rest in self._divided(inputs)]
        scales = [(root.scale.square() + rest.unsqueeze(1)).sqrt() for root, rest in roots]
        return LogitRoot(torch.cat(scales), roots[0][0].basis).to(inputs)

    def _divided(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of examples: where they are inside, (n, r), and the variance of the rest, (n,)."""
        size = max(1, _FEATURE_ELEMENTS.get(features.device.type, 2**25) // self.rows.layout.num_features)
        for some in slices(0, max(1, features.shape[0]), size):
            block = features[some]
            yield self.rows.coordinates(block), self.rows.outside(block) / self.precision

    def _covariances(self, features: Tensor) -> Iterator[Tensor]:
        """Covariances (n, K, K) of blocks of examples, in the basis' precision."""
        for at, rest in self._divided(features):
            covariance = self.inner.covariance(at)
            covariance.diagonal(dim1=1, dim2=2).add_(rest.unsqueeze(1))
            yield covariance
