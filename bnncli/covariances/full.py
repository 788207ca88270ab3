"""The full covariance: all pairs of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances._packed import PackedTriangle
from bnncli.covariances._roots import Rows, inverse_root, root_of_sum
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.system.memory import is_large

if TYPE_CHECKING:
    from torch import Tensor

# 7,700 parameters, float32, 16 chains, two threads: products take 60 ms with all of L, 13 to 16 ms without zeros.
_LARGE, _PRODUCT_WIDTH = 2048, 1024


@dataclass(frozen=True)
class Full:
    """Sigma = L L^T with L lower triangular.

    Args:
        scale_tril: L, (P, P).
        jitter: added to the precision's diagonal to factor it; nearly always 0.
    """

    structure: ClassVar[str] = "full"
    scale_tril: Tensor
    jitter: float = 0.0

    @property
    def num_params(self) -> int:
        """P."""
        return self.scale_tril.shape[0]

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Full:
        """Return (H + Lambda)^{-1}, with prior precisions Lambda, factored in float64.

        Raises:
            NumericError: the precision has no Cholesky factor even with the largest jitter.
        """
        matrix = hessian["hessian.full"].double()
        precisions = prior.diagonal(layout, device=matrix.device).double()
        if is_large(len(matrix)):
            mean = float(matrix.diagonal().mean() + precisions.mean())
            return from_rows(lambda start, stop: matrix[start:stop], precisions, mean=mean)
        precision = matrix.clone()
        precision.diagonal().add_(precisions)
        return inverse(precision)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        z, root = z.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return z @ root.T
        return torch.cat([z[:, :stop] @ root[start:stop, :stop].T for start, stop in self._panels()], dim=1)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return torch.linalg.solve_triangular(self.scale_tril, x.to(self.scale_tril).T, upper=False).T

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        gradient, root = gradient.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return gradient @ root
        return torch.cat([gradient[:, start:] @ root[start:, start:stop] for start, stop in self._panels()], dim=1)

    def packed(self) -> PackedTriangle | None:
        """Return L packed for thousands of float32 products with a few vectors; None if that gains nothing."""
        return PackedTriangle.of(self.scale_tril) if self.num_params > _LARGE else None

    def _panels(self) -> list[tuple[int, int]]:
        """Return ranges of rows and columns of L, whose products skip zeros."""
        size = self.num_params
        return [(start, min(start + _PRODUCT_WIDTH, size)) for start in range(0, size, _PRODUCT_WIDTH)]

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.scale_tril.diagonal().double().log().sum())

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        return self.scale_tril.square().sum(dim=1)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.scale_tril` (P, P) and `cov.jitter` (1,), float64."""
        jitter = torch.tensor([self.jitter], dtype=torch.float64)
        return {"cov.scale_tril": self.scale_tril.double().cpu().contiguous(), "cov.jitter": jitter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Full:
        """Invert to_tensors."""
        return cls(tensors["cov.scale_tril"], jitter=float(tensors["cov.jitter"]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """Return a copy on another device or in another precision."""
        return replace(self, scale_tril=self.scale_tril.to(device=device, dtype=dtype))


def inverse(precision: Tensor) -> Full:
    """Return the covariance of a precision (P, P), float64, which may be overwritten. Raises as from_hessian."""
    return Full(*inverse_root(precision))


def from_rows(rows: Rows, precisions: Tensor, *, mean: float) -> Full:
    """Return (H + Lambda)^{-1} of a large matrix, panel by panel, distributed over the workers.

    Args:
        rows: returns rows start..stop of H.
        precisions: diagonal of Lambda (P,), on the device of the result.
        mean: mean diagonal of H + Lambda.

    Raises:
        NumericError: as from_hessian.
    """
    return Full(*root_of_sum(rows, precisions, mean=mean))
