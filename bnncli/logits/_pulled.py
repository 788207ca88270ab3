"""The logits' covariance as a sum of squares: of roots that are made of the logits' derivatives, block of examples by block.

J Sigma J^T = sum_i R_i R_i^T, R_i (K, r) of each of Sigma's pieces: of all of it J L, which asks a covariance for nothing but
`pull_back`, and so serves each structure that brings no way of its own, and each network that has a Jacobian. That takes K P
numbers an example; a layer at a time (`_by_layer`) only those of the largest.
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

# Of inputs (n, ...), block by block, roots (b, K, r) of whichever sizes r.
RootMaker: TypeAlias = "Callable[[Tensor], Iterator[Iterable[Tensor]]]"


@dataclass(frozen=True)
class Pulled:
    """J Sigma J^T.

    Args:
        roots: of inputs, whose squares sum to it; never of all examples at once.
    """

    roots: RootMaker
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of J Sigma J^T, (n, K)."""
        return self._sums(inputs, lambda root: root.square().sum(dim=2, dtype=torch.float64)).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of P J Sigma J^T P, (n, K)."""

        def squares(root: Tensor) -> Tensor:
            return (root - root.mean(dim=1, keepdim=True)).square().sum(dim=2, dtype=torch.float64)

        return self._sums(inputs, squares).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """J Sigma J^T, (n, K, K)."""
        return self._products(inputs).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Roots (n, K, K) of the covariances, both in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self._products(inputs)).to(inputs)

    def _products(self, inputs: Tensor) -> Tensor:
        """(n, K, K) float64: what all logits share may be large, and float32 would lose the rest in the sums."""

        def squared(root: Tensor) -> Tensor:
            wide = root.double()
            return wide @ wide.mT

        return self._sums(inputs, squared)

    def _sums(self, inputs: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        """What is made of each root, added up."""
        totals = []
        for block in self.roots(inputs):
            total: Tensor | None = None
            for root in block:
                total = work(root) if total is None else total.add_(work(root))
            assert total is not None
            totals.append(total)
        return torch.cat(totals)


def pulled(covariance: Covariance, jacobian: Callable[[Tensor], Tensor]) -> Pulled:
    """J L at once, of any covariance Sigma = L L^T, by the logits' derivatives (n, K, P) at inputs (n, ...)."""

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        one = jacobian(inputs[:1])
        size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // one[0].numel()) if len(one) else 1
        for some in slices(0, max(1, len(inputs)), size):
            rows = jacobian(inputs[some])
            yield (covariance.pull_back(rows.flatten(0, 1)).view(rows.shape),)

    return Pulled(roots)
