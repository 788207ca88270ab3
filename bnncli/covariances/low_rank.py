"""The covariance of a low-rank Hessian: (U^T S U + Lambda)^{-1} by the Woodbury identity, for any prior.

With U (r, P), S diagonal, and Q (P, r) and c^{1/2} the left singular vectors and the singular values of Lambda^{-1/2}
U^T S^{1/2}, the precision is Lambda^{1/2} (I + Q diag(c) Q^T) Lambda^{1/2}, and L = Lambda^{-1/2} (I + Q diag((1 +
c)^{-1/2} - 1) Q^T) satisfies L L^T = Sigma exactly. Outside the r directions it is the prior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("hessian.low-rank.vectors", "hessian.low-rank.values")


@dataclass(frozen=True)
class LowRank:
    """Sigma; build with from_hessian.

    Args:
        basis: Q, (P, r).
        curvature: c, (r,), not negative: curvature of H relative to the prior along each direction.
        precisions: Lambda, (P,).
        hessian: U (r, P) and S (r,), by their names in a file.
        prior: source of the precisions.
    """

    structure: ClassVar[str] = "low-rank"
    basis: Tensor
    curvature: Tensor
    precisions: Tensor
    hessian: dict[str, Tensor]
    prior: Prior

    @property
    def num_params(self) -> int:
        """P."""
        return len(self.precisions)

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> LowRank:
        """Return (U^T S U + Lambda)^{-1}. Raises NumericError if H is not finite."""
        vectors, values = (hessian[name].double() for name in _PARTS)
        if not (torch.isfinite(vectors).all() and torch.isfinite(values).all()):
            raise NumericError("the eigenvectors of the Hessian are not finite", hint="check the inputs")
        precisions = prior.diagonal(layout, device=vectors.device)
        basis, triangle = torch.linalg.qr((vectors * values.sqrt().unsqueeze(1) * precisions.rsqrt()).T)
        rotation, roots, _ = torch.linalg.svd(triangle)
        return cls(
            basis @ rotation, roots.square(), precisions, dict(zip(_PARTS, (vectors, values), strict=True)), prior
        )

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._scaled(z, (1 + self.curvature).rsqrt()) * self.precisions.rsqrt()

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._scaled(x.to(self.precisions) * self.precisions.sqrt(), (1 + self.curvature).sqrt())

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._scaled(gradient.to(self.precisions) * self.precisions.rsqrt(), (1 + self.curvature).rsqrt())

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(-0.5 * (self.curvature.double().log1p().sum() + self.precisions.double().log().sum()))

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        lessened = self.curvature / (1 + self.curvature)
        return (1 - self.basis.square() @ lessened) / self.precisions

    def to_tensors(self) -> dict[str, Tensor]:
        """Return U and S, float64, and the prior's tensors; loading recomputes Q."""
        stored = {name: part.double().cpu().contiguous() for name, part in self.hessian.items()}
        return {**stored, **self.prior.to_tensors()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> LowRank:
        """Invert to_tensors."""
        return cls.from_hessian(tensors, Prior.from_tensors(tensors), layout)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LowRank:
        """Return a copy on another device or in another precision; stored tensors are unchanged."""
        changed = {
            name: getattr(self, name).to(device=device, dtype=dtype) for name in ("basis", "curvature", "precisions")
        }
        return replace(self, **changed)

    def _scaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """Return x (S, P) times (I + Q diag(factors - 1) Q^T)."""
        x = x.to(self.precisions)
        return x + ((x @ self.basis) * (factors - 1)) @ self.basis.T
