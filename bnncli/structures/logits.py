"""Covariances of the logits at an input: their interface, independent logits, and roots pulled back from theta.

With J the Jacobian of the logits in theta at an input, the covariance is J Sigma J^T = sum_i R_i R_i^T with R_i (K, r)
for each piece of Sigma. For Sigma as a whole, R is J L, which needs only `pull_back` from the covariance: it works for
any structure and any network with a Jacobian, but takes K P numbers per example. One layer at a time
(`network_logits`) takes only those of the largest layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures import Covariance
from bnncli.targets.blocks import BLOCK_ELEMENTS, slices

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


@dataclass(frozen=True)
class Independent:
    """A diagonal covariance.

    Args:
        variance_at: maps features (n, D) to the variance of each logit (n, K).
    """

    variance_at: Callable[[Tensor], Tensor]
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each logit, (n, K)."""
        return self.variance_at(inputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P S P, (n, K), for S = diag(variance): S_kk (1 - 2/K) + sum_l S_ll / K^2."""
        variance = self.variance_at(inputs)
        num_outputs = variance.shape[1]
        return variance * (1 - 2 / num_outputs) + variance.sum(dim=1, keepdim=True) / num_outputs**2

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return diagonal covariances, (n, K, K)."""
        return self.variance_at(inputs).diag_embed()

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return standard deviations (n, K)."""
        return LogitRoot(self.variance_at(inputs).sqrt())


# Maps inputs (n, ...) to roots (b, K, r), block by block, with any sizes r.
RootMaker: TypeAlias = "Callable[[Tensor], Iterator[Iterable[Tensor]]]"


@dataclass(frozen=True)
class Pulled:
    """J Sigma J^T.

    Args:
        roots: maps inputs to roots whose squares sum to J Sigma J^T, never for all examples at once.
        recall: maps inputs and a function that computes J Sigma J^T at inputs to that, (n, K, K), or its cached value;
            None where nothing is cached.
    """

    roots: RootMaker
    recall: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor | None] | None = None
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of J Sigma J^T, (n, K)."""
        if (known := self._recalled(inputs)) is not None:
            return known.diagonal(dim1=1, dim2=2).to(inputs.dtype)
        return self._sums(inputs, lambda root: root.square().sum(dim=2, dtype=torch.float64)).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P J Sigma J^T P, (n, K)."""
        if (known := self._recalled(inputs)) is not None:
            centred = known - known.mean(dim=1, keepdim=True)
            return (centred - centred.mean(dim=2, keepdim=True)).diagonal(dim1=1, dim2=2).to(inputs.dtype)

        def squares(root: Tensor) -> Tensor:
            return (root - root.mean(dim=1, keepdim=True)).square().sum(dim=2, dtype=torch.float64)

        return self._sums(inputs, squares).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return J Sigma J^T, (n, K, K)."""
        return self._known_products(inputs).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots (n, K, K) of the covariances, in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self._known_products(inputs)).to(inputs)

    def _known_products(self, inputs: Tensor) -> Tensor:
        known = self._recalled(inputs)
        return self._products(inputs) if known is None else known

    def _recalled(self, inputs: Tensor) -> Tensor | None:
        return None if self.recall is None else self.recall(inputs, self._products)

    def _products(self, inputs: Tensor) -> Tensor:
        """Return J Sigma J^T, (n, K, K) float64, because a large shared component would swamp the rest in float32."""

        def squared(root: Tensor) -> Tensor:
            wide = root.double()
            return wide @ wide.mT

        return self._sums(inputs, squared)

    def _sums(self, inputs: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum `work` over the roots."""
        totals = []
        for block in self.roots(inputs):
            total: Tensor | None = None
            for root in block:
                total = work(root) if total is None else total.add_(work(root))
            assert total is not None
            totals.append(total)
        return torch.cat(totals)


def head_spread(covariance: Covariance, layout: HeadLayout) -> LogitCovariance:
    """Return the covariance of a last layer's logits at features (n, D), by the structure's fast path if any."""
    fast: Callable[[HeadLayout], LogitCovariance] | None = getattr(covariance, "head_logits", None)
    return pull_back_logits(covariance, layout.jacobian) if fast is None else fast(layout)


def pull_back_logits(covariance: Covariance, jacobian: Callable[[Tensor], Tensor]) -> Pulled:
    """Return the covariance J Sigma J^T for any Sigma = L L^T, given the Jacobian (n, K, P) at inputs (n, ...)."""

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        one = jacobian(inputs[:1])
        size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // one[0].numel()) if len(one) else 1
        for some in slices(0, max(1, len(inputs)), size):
            rows = jacobian(inputs[some])
            yield (covariance.pull_back(rows.flatten(0, 1)).view(rows.shape),)

    return Pulled(roots)
