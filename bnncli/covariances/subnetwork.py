"""The covariance of some parameters, the others fixed at the mean: Sigma = L L^T, L (P, N) with N nonzero rows.

A draw uses N standard normals, and its density is that of the N parameters given all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.covariances.full import Full, inverse
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

AS_THE_PRIOR = 0.95  # share of the prior's variance above which the data say next to nothing


@dataclass(frozen=True)
class Subnetwork:
    """Sigma; build with from_hessian.

    Args:
        varying: places in theta of the parameters that vary, (N,) int64, ascending.
        inner: their covariance.
        num_params: P.
    """

    structure: ClassVar[str] = "subnetwork"
    varying: Tensor
    inner: Full
    num_params: int

    @property
    def jitter(self) -> float:
        """Jitter added to the precision's diagonal."""
        return self.inner.jitter

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Subnetwork:
        """Return (H + Lambda)^{-1} of the parameters that vary. Raises NumericError if not positive definite."""
        varying = hessian["hessian.subnetwork.indices"]
        precision = hessian["hessian.subnetwork.values"].double().clone()
        precision.diagonal().add_(prior.diagonal(layout, device=precision.device)[varying])
        return cls(varying, inverse(precision), layout.num_params)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T (S, P), given z (S, N)."""
        moved = self.inner.unwhiten(z)
        theta = moved.new_zeros(len(moved), self.num_params)
        theta[:, self.varying] = moved
        return theta

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x (S, N), given x (S, P)."""
        return self.inner.whiten(x[:, self.varying])

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L (S, N), given gradient (S, P)."""
        return self.inner.pull_back(gradient[:, self.varying])

    def log_det_scale(self) -> float:
        """Return log|det L| of the parameters that vary."""
        return self.inner.log_det_scale()

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        variances = self.inner.scale_tril.new_zeros(self.num_params)
        variances[self.varying] = self.inner.marginal_variances()
        return variances

    def metrics(self, prior: Prior, layout: ParamLayout) -> dict[str, Any]:
        """Count the parameters that vary, in total and per tensor, and those that keep nearly all prior variance."""
        share = self.inner.marginal_variances() * prior.diagonal(layout, device=self.varying.device)[self.varying]
        places = self.varying.cpu()
        inside = {part.name: (places >= part.place.start) & (places < part.place.stop) for part in layout.parts}
        counts = {name: int(one.sum()) for name, one in inside.items()}
        return {
            "subnetwork_size": len(places),
            "subnetwork_params": {name: count for name, count in counts.items() if count},
            "subnetwork_as_prior": int((share > AS_THE_PRIOR).sum()),
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.varying` (N,) int64, and `cov.scale_tril` (N, N) and `cov.jitter` (1,), float64."""
        return {"cov.varying": self.varying.cpu().contiguous(), **self.inner.to_tensors()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Subnetwork:
        """Invert to_tensors."""
        return cls(tensors["cov.varying"], Full.from_tensors(tensors, layout), layout.num_params)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subnetwork:
        """Return a copy on another device or in another precision."""
        return replace(self, varying=self.varying.to(device=device), inner=self.inner.to(device=device, dtype=dtype))
