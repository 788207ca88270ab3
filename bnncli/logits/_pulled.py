"""The logits' covariance as a sum of squares of roots computed from the Jacobian, one block of examples at a time.

J Sigma J^T = sum_i R_i R_i^T with R_i (K, r) for each piece of Sigma. For Sigma as a whole, R is J L, which needs only
`pull_back` from the covariance. It therefore works for any structure without a fast path and any network with a
Jacobian, but takes K P numbers per example. One layer at a time (`_by_layer`) takes only those of the largest layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from bnncli.covariances import Covariance
from bnncli.lazy import torch
from bnncli.logits import LogitRoot, root_of_covariances
from bnncli.targets.blocks import BLOCK_ELEMENTS, slices

if TYPE_CHECKING:
    from torch import Tensor

# Maps inputs (n, ...) to roots (b, K, r), block by block, with any sizes r.
RootMaker: TypeAlias = "Callable[[Tensor], Iterator[Iterable[Tensor]]]"


@dataclass(frozen=True)
class Pulled:
    """J Sigma J^T.

    Args:
        roots: maps inputs to roots whose squares sum to J Sigma J^T, never for all examples at once.
    """

    roots: RootMaker
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of J Sigma J^T, (n, K)."""
        return self._sums(inputs, lambda root: root.square().sum(dim=2, dtype=torch.float64)).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P J Sigma J^T P, (n, K)."""

        def squares(root: Tensor) -> Tensor:
            return (root - root.mean(dim=1, keepdim=True)).square().sum(dim=2, dtype=torch.float64)

        return self._sums(inputs, squares).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return J Sigma J^T, (n, K, K)."""
        return self._products(inputs).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots (n, K, K) of the covariances, in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self._products(inputs)).to(inputs)

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


def pulled(covariance: Covariance, jacobian: Callable[[Tensor], Tensor]) -> Pulled:
    """Return the covariance J Sigma J^T for any Sigma = L L^T, given the Jacobian (n, K, P) at inputs (n, ...)."""

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        one = jacobian(inputs[:1])
        size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // one[0].numel()) if len(one) else 1
        for some in slices(0, max(1, len(inputs)), size):
            rows = jacobian(inputs[some])
            yield (covariance.pull_back(rows.flatten(0, 1)).view(rows.shape),)

    return Pulled(roots)
