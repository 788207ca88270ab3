"""The Gaussian of the logits of an input, under a Gaussian over theta: the one place that is asked for it.

With J the logits' derivatives by theta at an input, their mean is that of the network at the mean of theta and their
covariance J Sigma J^T. A last layer is linear in theta, so that this is exact (`_head`); a network is linearised. `_asked` is where both are asked.
Each file here is the short way of one structure of Sigma; a structure without a file is pulled back through J (`_pulled`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MOST_PASSES = 32  # outputs up to which matrices are multiplied by a pass each; measured on two CPU cores


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
        """R_n z for every z of noise (s, K) and every example, (s, K, n); or z_n of noise (s, K, n), each example's own."""
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
        )  # a pass an output: products of many small matrices take ten times as long
        for output in range(1, noise.shape[1]):
            product.addcmul_(noise[:, output : output + 1], self._columns[output])
        return product

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


class LogitCovariance(Protocol):
    """J Sigma J^T at inputs (n, ...), of which each question is answered with as little as it takes, in the inputs' precision."""

    @property
    def is_dense(self) -> bool:
        """Whether roots are matrices (n, K, K), so that what is added to a covariance asks for another root."""

    def variance(self, inputs: Tensor) -> Tensor:
        """Of each logit, (n, K): the diagonal alone, nothing of size K^2 an example."""

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Of each logit minus the logits' mean, (n, K), at the cost of variance.

        The diagonal of P S P with P = I - 11^T / K and S the logits' covariance.
        """

    def covariance(self, inputs: Tensor) -> Tensor:
        """Of all pairs of logits, (n, K, K)."""

    def root(self, inputs: Tensor) -> LogitRoot:
        """Roots of the covariances, for draws of the logits."""


@dataclass(frozen=True)
class LogitGaussian:
    """N(mean, J Sigma J^T), as a function of inputs.

    Args:
        mean: of inputs (n, ...), the logits (n, K) at the mean of theta.
        spread: their covariance.
        push: of inputs (n, ...) and deviations of theta (S, P), those of the logits, (S, n, K); None where the covariance is always
            the shorter way to draws.
    """

    mean: Callable[[Tensor], Tensor]
    spread: LogitCovariance
    push: Callable[[Tensor, Tensor], Tensor] | None = None

    def marginals(self, inputs: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and variance (n, K) of each logit; minus the logits' mean if projected."""
        mean = self.mean(inputs)
        if is_projected:
            return mean - mean.mean(dim=1, keepdim=True), self.spread.projected_variance(inputs)
        return mean, self.spread.variance(inputs)

    def moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K) of the logits."""
        return self.mean(inputs), self.spread.covariance(inputs)

    def root(self, inputs: Tensor) -> tuple[Tensor, LogitRoot]:
        """Mean (n, K) of the logits, and roots of their covariances, to draw logits with."""
        return self.mean(inputs), self.spread.root(inputs)
