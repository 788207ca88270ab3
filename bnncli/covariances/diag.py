"""The diagonal covariance: the inverse of the Hessian's diagonal plus the prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


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

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Diag:
        """1 / (diag(H) + the prior's precisions). Raises NumericError when that is not finite."""
        curvature = hessian["hessian.diag"].double()
        variances = 1 / (curvature + prior.diagonal(layout, device=curvature.device))
        if not (torch.isfinite(curvature).all() and torch.isfinite(variances).all()):
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

    def widest(self, count: int) -> Tensor:
        """The coordinates of the largest variances as directions (P, K), one-hot; of equal ones the first."""
        places = self.variances.sort(descending=True, stable=True).indices[:count]
        basis = torch.zeros(self.num_params, count, dtype=torch.float64, device=places.device)
        return basis.scatter_(0, places.unsqueeze(0), 1.0)

    def marginal_variances(self) -> Tensor:
        """The variances, (P,)."""
        return self.variances

    def to_tensors(self) -> dict[str, Tensor]:
        """`cov.diag`, (P,) float64."""
        return {"cov.diag": self.variances.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Diag:
        """The inverse of to_tensors."""
        return cls(tensors["cov.diag"])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diag:
        """A copy elsewhere or in another precision."""
        return replace(self, variances=self.variances.to(device=device, dtype=dtype))
