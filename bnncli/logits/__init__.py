"""Roots of the logits' covariances at given features: what draws of the logits are made with, as small as the structure allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitRoot:
    """R_n with R_n R_n^T the covariance of the K logits of example n.

    Args:
        scale: (n, K): R_n = U diag(scale_n); or (n, K, K): R_n itself.
        basis: U (K, K), shared by all examples; None for the identity.
    """

    scale: Tensor
    basis: Tensor | None = None

    def apply(self, noise: Tensor) -> Tensor:
        """R_n z for every z of noise (s, K) and every example, (s, K, n)."""
        if self.scale.ndim == 3:
            return (noise @ self._columns.flatten(1)).unflatten(1, self._columns.shape[1:])
        scaled = self._columns * noise.unsqueeze(2)
        return scaled if self.basis is None else torch.bmm(self.basis.expand(len(noise), -1, -1), scaled)

    @cached_property
    def _columns(self) -> Tensor:
        """The scale with examples last, (K, n) or (K, K, n): what all draws multiply."""
        return self.scale.T.contiguous() if self.scale.ndim == 2 else self.scale.permute(2, 1, 0).contiguous()

    def to(self, tensor: Tensor) -> LogitRoot:
        """The same in the precision, and on the device, of a tensor."""
        return LogitRoot(self.scale.to(tensor), None if self.basis is None else self.basis.to(tensor))


def root_of_covariances(covariances: Tensor) -> LogitRoot:
    """Roots of covariances (n, K, K), float64: Cholesky factors, and where there is none because rounding has made the
    matrix singular or it is zero, the root of its eigenvalues, negative ones taken as zero; NaN for what is not finite."""
    roots, failed = torch.linalg.cholesky_ex(covariances)
    if bool(failed.any()):  # waits for a GPU, once a block of examples
        is_finite = torch.isfinite(covariances).flatten(1).all(dim=1)
        roots[~is_finite] = torch.nan
        singular = is_finite & (failed != 0)
        values, vectors = torch.linalg.eigh(covariances[singular])
        roots[singular] = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    return LogitRoot(roots)
