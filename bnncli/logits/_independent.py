"""Logits that are independent: of structures that tie no parameters of different outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.logits import LogitRoot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Independent:
    """A diagonal covariance.

    Args:
        variance_at: of features (n, D), each logit's variance (n, K).
    """

    variance_at: Callable[[Tensor], Tensor]
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Of each logit, (n, K)."""
        return self.variance_at(inputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """The diagonal of P S P, (n, K), for S = diag(variance): S_kk (1 - 2/K) + sum_l S_ll / K^2."""
        variance = self.variance_at(inputs)
        num_outputs = variance.shape[1]
        return variance * (1 - 2 / num_outputs) + variance.sum(dim=1, keepdim=True) / num_outputs**2

    def covariance(self, inputs: Tensor) -> Tensor:
        """Diagonal, (n, K, K)."""
        return self.variance_at(inputs).diag_embed()

    def root(self, inputs: Tensor) -> LogitRoot:
        """Standard deviations (n, K)."""
        return LogitRoot(self.variance_at(inputs).sqrt())
