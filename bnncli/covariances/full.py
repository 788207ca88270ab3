"""The full covariance: every pair of parameters."""

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

# Parameters: of 7,700 (float32, 16 chains, two threads) products with all of L take 60 ms, with what is not zero 13 to 16.
_LARGE, _PRODUCT_WIDTH = 2048, 1024


@dataclass(frozen=True)
class Full:
    """Sigma = L L^T with L lower triangular.

    Args:
        scale_tril: L, (P, P).
        jitter: what had to be added to the precision's diagonal before it could be factored; 0 nearly always.
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
        """(H + Lambda)^{-1}, Lambda the prior's precisions, factored in float64.

        Raises:
            NumericError: when even the largest jitter leaves the precision without a Cholesky factor.
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
        """z L^T, (S, P)."""
        z, root = z.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return z @ root.T
        return torch.cat([z[:, :stop] @ root[start:stop, :stop].T for start, stop in self._panels()], dim=1)

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        return torch.linalg.solve_triangular(self.scale_tril, x.to(self.scale_tril).T, upper=False).T

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        gradient, root = gradient.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return gradient @ root
        return torch.cat([gradient[:, start:] @ root[start:, start:stop] for start, stop in self._panels()], dim=1)

    def packed(self) -> PackedTriangle | None:
        """The same L for thousands of float32 products of a few vectors; None where nothing is gained."""
        return PackedTriangle.of(self.scale_tril) if self.num_params > _LARGE else None

    def _panels(self) -> list[tuple[int, int]]:
        """Rows and columns of L in parts, whose products leave out what is zero."""
        size = self.num_params
        return [(start, min(start + _PRODUCT_WIDTH, size)) for start in range(0, size, _PRODUCT_WIDTH)]

    def log_det_scale(self) -> float:
        """log|det L|."""
        return float(self.scale_tril.diagonal().double().log().sum())

    def marginal_variances(self) -> Tensor:
        """The diagonal of Sigma, (P,)."""
        return self.scale_tril.square().sum(dim=1)

    def to_tensors(self) -> dict[str, Tensor]:
        """`cov.scale_tril` (P, P) and `cov.jitter` (1,), float64."""
        jitter = torch.tensor([self.jitter], dtype=torch.float64)
        return {"cov.scale_tril": self.scale_tril.double().cpu().contiguous(), "cov.jitter": jitter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Full:
        """The inverse of to_tensors."""
        return cls(tensors["cov.scale_tril"], jitter=float(tensors["cov.jitter"]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """A copy elsewhere or in another precision."""
        return replace(self, scale_tril=self.scale_tril.to(device=device, dtype=dtype))


def inverse(precision: Tensor) -> Full:
    """The covariance of a precision (P, P), float64, that may be changed. Raises NumericError as from_hessian does."""
    return Full(*inverse_root(precision))


def from_rows(rows: Rows, precisions: Tensor, *, mean: float) -> Full:
    """(H + Lambda)^{-1} of a large matrix, panel by panel, shared out among workers where there are several.

    Args:
        rows: gives those of H from start to stop.
        precisions: Lambda's diagonal (P,), where the root shall be.
        mean: of the diagonal of H + Lambda.

    Raises:
        NumericError: as from_hessian.
    """
    return Full(*root_of_sum(rows, precisions, mean=mean))
