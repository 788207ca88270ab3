"""The logits' covariance under any covariance of theta, pulled back through the Jacobian: J L L^T J^T.

It asks the covariance for nothing but `pull_back`, and so serves each structure that brings no way of its own, and each
network that has a Jacobian. It takes K P numbers an example: for heads of a few thousand parameters, not of millions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.covariances import Covariance
from bnncli.logits import LogitRoot, root_of_covariances
from bnncli.targets.stream import BLOCK_ELEMENTS, slices


@dataclass(frozen=True)
class Pulled:
    """J Sigma J^T.

    Args:
        theta_covariance: Sigma = L L^T.
        jacobian: of inputs (n, ...), the logits' derivatives by theta, (n, K, P).
    """

    theta_covariance: Covariance
    jacobian: Callable[[Tensor], Tensor]
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of J Sigma J^T, (n, K)."""
        return torch.cat([root.square().sum(dim=2) for root in self._roots(inputs)]).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of P J Sigma J^T P, (n, K)."""
        roots = (root - root.mean(dim=1, keepdim=True) for root in self._roots(inputs))
        return torch.cat([root.square().sum(dim=2) for root in roots]).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """J Sigma J^T, (n, K, K)."""
        return torch.cat([root @ root.mT for root in self._roots(inputs)]).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Roots (n, K, K) of the covariances, both computed in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self.covariance(inputs.double())).to(inputs)

    def _roots(self, inputs: Tensor) -> Iterator[Tensor]:
        """J L, (b, K, P), of blocks of examples."""
        one = self.jacobian(inputs[:1])
        size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // one[0].numel()) if len(one) else 1
        for some in slices(0, max(1, len(inputs)), size):
            rows = self.jacobian(inputs[some])
            yield self.theta_covariance.pull_back(rows.flatten(0, 1)).view(rows.shape)
