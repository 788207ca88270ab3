"""The Gaussian of the logits at an input, under a Gaussian over theta.

With J the Jacobian of the logits in theta at an input, their mean is the network's output at the mean of theta, and
their covariance is J Sigma J^T. A last layer is linear in theta, so this is exact (`_head`); a network is linearised.
`_asked` is the entry point for both. Each file here is the fast path of one structure of Sigma; other structures are
pulled back through J (`_pulled`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MOST_PASSES = 32  # outputs up to which matrices are multiplied by one pass per output; measured on two CPU cores


@dataclass(frozen=True)
class LogitRoot:
    """R_n with R_n R_n^T the covariance of the K logits of example n.

    Args:
        scale: (n, K) for R_n = U diag(scale_n), or (n, K, K) for R_n itself.
        basis: U (K, K), shared by all examples; None for the identity.
    """

    scale: Tensor
    basis: Tensor | None = None

    def apply(self, noise: Tensor) -> Tensor:
        """Return R_n z for shared noise z (s, K), or R_n z_n for per-example noise (s, K, n): (s, K, n)."""
        if self.scale.ndim == 3:
            return self._of_matrices(noise)
        scaled = self._columns * (noise if noise.ndim == 3 else noise.unsqueeze(2))
        return scaled if self.basis is None else torch.bmm(self.basis.expand(len(noise), -1, -1), scaled)

    def _of_matrices(self, noise: Tensor) -> Tensor:
        if noise.ndim == 2:
            return (noise @ self._columns.flatten(1)).unflatten(1, self._columns.shape[1:])
        if noise.shape[1] > _MOST_PASSES:
            return torch.bmm(noise.permute(2, 0, 1), self.scale.mT).permute(1, 2, 0).contiguous()
        product = (
            noise[:, :1] * self._columns[0]
        )  # one pass per output; batched products of many small matrices take ten times as long
        for output in range(1, noise.shape[1]):
            product.addcmul_(noise[:, output : output + 1], self._columns[output])
        return product

    @cached_property
    def _columns(self) -> Tensor:
        """The scale with examples last, (K, n) or (K, K, n)."""
        return self.scale.T.contiguous() if self.scale.ndim == 2 else self.scale.permute(2, 1, 0).contiguous()

    def to(self, tensor: Tensor) -> LogitRoot:
        """Return a copy with the dtype and device of a tensor."""
        return LogitRoot(self.scale.to(tensor), None if self.basis is None else self.basis.to(tensor))


def root_of_covariances(covariances: Tensor) -> LogitRoot:
    """Return roots of covariances (n, K, K), float64: Cholesky factors where they exist.

    Matrices that are zero, or singular after rounding, get the root of their eigenvalues, with negative ones set to
    zero. Matrices that are not finite get NaN.
    """
    roots, failed = torch.linalg.cholesky_ex(covariances)
    if bool(failed.any()):  # synchronises with a GPU once per block of examples
        is_finite = torch.isfinite(covariances).flatten(1).all(dim=1)
        roots[~is_finite] = torch.nan
        singular = is_finite & (failed != 0)
        values, vectors = torch.linalg.eigh(covariances[singular])
        roots[singular] = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    return LogitRoot(roots)


class LogitCovariance(Protocol):
    """J Sigma J^T at inputs (n, ...), in the inputs' precision. Each method computes only what it returns."""

    @property
    def is_dense(self) -> bool:
        """Return whether roots are matrices (n, K, K), so that adding to a covariance requires a new root."""

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each logit, (n, K), without K^2 numbers per example."""

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each logit minus the mean of the logits, (n, K), at the cost of `variance`.

        The diagonal of P S P with P = I - 11^T / K and S the covariance of the logits.
        """

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return the covariance of the logits, (n, K, K)."""

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots of the covariances, to draw logits."""


@dataclass(frozen=True)
class LogitGaussian:
    """N(mean, J Sigma J^T), as a function of inputs.

    Args:
        mean: maps inputs (n, ...) to the logits (n, K) at the mean of theta.
        spread: their covariance.
        push: maps inputs (n, ...) and deviations of theta (S, P) to deviations of the logits, (S, n, K); None if
            drawing from the covariance is always cheaper.
    """

    mean: Callable[[Tensor], Tensor]
    spread: LogitCovariance
    push: Callable[[Tensor, Tensor], Tensor] | None = None

    def marginals(self, inputs: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and variance (n, K) of each logit, minus the mean of the logits if projected."""
        mean = self.mean(inputs)
        if is_projected:
            return mean - mean.mean(dim=1, keepdim=True), self.spread.projected_variance(inputs)
        return mean, self.spread.variance(inputs)

    def moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the logits."""
        return self.mean(inputs), self.spread.covariance(inputs)

    def root(self, inputs: Tensor) -> tuple[Tensor, LogitRoot]:
        """Return mean (n, K) of the logits and roots of their covariances, to draw logits."""
        return self.mean(inputs), self.spread.root(inputs)
