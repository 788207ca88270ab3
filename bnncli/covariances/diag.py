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
        """Return 1 / (diag(H) + prior precisions). Raises NumericError if that is not finite."""
        curvature = hessian["hessian.diag"].double()
        variances = 1 / (curvature + prior.diagonal(layout, device=curvature.device))
        if not (torch.isfinite(curvature).all() and torch.isfinite(variances).all()):
            raise NumericError("the diagonal of the Hessian is not finite", hint="check the features")
        return cls(variances)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return z.to(self.variances) * self.variances.sqrt()

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return x.to(self.variances) / self.variances.sqrt()

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self.unwhiten(gradient)

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(0.5 * self.variances.double().log().sum())

    def widest(self, count: int) -> Tensor:
        """Return the coordinates of the largest variances as one-hot directions (P, K); ties go to the first."""
        places = self.variances.sort(descending=True, stable=True).indices[:count]
        basis = torch.zeros(self.num_params, count, dtype=torch.float64, device=places.device)
        return basis.scatter_(0, places.unsqueeze(0), 1.0)

    def marginal_variances(self) -> Tensor:
        """Return the variances, (P,)."""
        return self.variances

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.diag`, (P,) float64."""
        return {"cov.diag": self.variances.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Diag:
        """Invert to_tensors."""
        return cls(tensors["cov.diag"])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diag:
        """Return a copy on another device or in another precision."""
        return replace(self, variances=self.variances.to(device=device, dtype=dtype))
