"""The diagonal covariance: the inverse of the Hessian's diagonal, sum_n p_k (1 - p_k) x_d^2, plus the prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.covariances import project_independent
from bnncli.errors import NumericError
from bnncli.logits import LogitRoot
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior


@dataclass(frozen=True)
class Diag:
    """Independent parameters.

    Args:
        variances: (P,), positive.
    """

    structure: ClassVar[str] = "diag"
    variances: Tensor

    @property
    def num_params(self) -> int:
        """P."""
        return self.variances.shape[0]

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """P."""
        return layout.num_params

    @staticmethod
    def curvature_sums(features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
        """sum_n p_k (1 - p_k) x_d^2, (K, F)."""
        return (((probabilities * (1 - probabilities)) @ features.square()).double(),)

    @staticmethod
    def hessian(sums: tuple[Tensor, ...], layout: HeadLayout, num_examples: int) -> dict[str, Tensor]:
        """`hessian.diag`, (P,) float64."""
        return {"hessian.diag": layout.flatten(sums[0])}

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: HeadLayout) -> Diag:
        """1 / (diag(H) + the prior's precisions). Raises NumericError when that is not finite."""
        curvature = hessian["hessian.diag"].double()
        variances = 1 / (curvature + prior.diagonal(layout, device=curvature.device))
        if not torch.isfinite(variances).all():
            raise NumericError("the diagonal of the Hessian is not finite", hint="check the features")
        return cls(variances)

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""
        return z.to(self.variances) * self.variances.sqrt()

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        return x.to(self.variances) / self.variances.sqrt()

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        return self.unwhiten(gradient)

    def log_det_scale(self) -> float:
        """log|det L|."""
        return float(0.5 * self.variances.double().log().sum())

    def logit_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """The diagonal of J Sigma J^T, (n, K), O(K F) an example."""
        squares = layout.augment_features(features).to(self.variances).square()
        return (squares @ layout.augment(self.variances).T).to(features.dtype)

    def logit_projected_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """The diagonal of P J Sigma J^T P, (n, K); outputs are independent."""
        return project_independent(self.logit_variance(features, layout))

    def logit_covariance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact J Sigma J^T, (n, K, K): diagonal."""
        return self.logit_variance(features, layout).diag_embed()

    def logit_root(self, features: Tensor, layout: HeadLayout) -> LogitRoot:
        """Standard deviations (n, K): the logits are independent."""
        return LogitRoot(self.logit_variance(features, layout).sqrt())

    def to_tensors(self) -> dict[str, Tensor]:
        """`cov.diag`, (P,) float64."""
        return {"cov.diag": self.variances.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: HeadLayout) -> Diag:
        """The inverse of to_tensors."""
        return cls(tensors["cov.diag"])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diag:
        """A copy elsewhere or in another precision."""
        return replace(self, variances=self.variances.to(device=device, dtype=dtype))
