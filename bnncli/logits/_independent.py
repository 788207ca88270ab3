"""Independent logits, for structures without covariance between parameters of different outputs."""

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
