"""The covariance of SWAG: half of a diagonal and half of the spread of a few deviations, as published, times a scale.

Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), arXiv:1902.02476, equation (1): Sigma = s (diag(v) / 2 + D D^T / (2 (R - 1))), D (P, R).

With A = (s v / 2)^1/2 and Q (P, R), c^1/2 the left singular vectors and singular values of A^-1 (s / (2 (R - 1)))^1/2 D,
L = A (I + Q diag((1 + c)^1/2 - 1) Q^T) has L L^T = Sigma exactly, and its inverse and determinant are Woodbury's and Sylvester's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

_VARIANCES, _DEVIATIONS, _SCALE = "cov.swag.variances", "cov.swag.deviations", "cov.swag.scale"


@dataclass(frozen=True)
class Swag:
    """Sigma; build with `of`.

    Args:
        roots: A, (P,).
        basis: Q, (P, R).
        spread: c, (R,), not negative.
        stored: v, D^T and s, by the names that a file has them under.
    """

    structure: ClassVar[str] = "swag"
    roots: Tensor
    basis: Tensor
    spread: Tensor
    stored: dict[str, Tensor]

    @classmethod
    def of(cls, variances: Tensor, deviations: Tensor, scale: float = 1.0) -> Swag:
        """Sigma of v (P,), positive, and D^T (R, P), R at least 2."""
        variances, deviations = variances.double(), deviations.double()
        roots = (0.5 * scale * variances).sqrt()
        scaled = deviations * (0.5 * scale / (len(deviations) - 1)) ** 0.5 / roots
        # R is small: the squares of R deviations have all there is to know of the left singular vectors.
        values, vectors = torch.linalg.eigh(scaled @ scaled.T)
        spread = values.clamp_min(0)
        basis = scaled.T @ vectors / spread.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        is_there = spread > 1e-14 * spread.max()
        stored = {
            _VARIANCES: variances,
            _DEVIATIONS: deviations,
            _SCALE: torch.tensor([scale], dtype=torch.float64),
        }
        return cls(roots, basis * is_there, spread * is_there, stored)

    @property
    def num_params(self) -> int:
        """P."""
        return len(self.roots)

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""
        return self._scaled(z, (1 + self.spread).sqrt()) * self.roots

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        return self._scaled(x.to(self.roots) / self.roots, (1 + self.spread).rsqrt())

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        return self._scaled(gradient.to(self.roots) * self.roots, (1 + self.spread).sqrt())

    def log_det_scale(self) -> float:
        """log|det L|."""
        return float(self.roots.double().log().sum() + 0.5 * self.spread.double().log1p().sum())

    def marginal_variances(self) -> Tensor:
        """The diagonal of Sigma, (P,)."""
        return self.roots.square() * (1 + self.basis.square() @ self.spread)

    def to_tensors(self) -> dict[str, Tensor]:
        """v and s in float64, D^T as it was collected, float32."""
        stored = {name: part.cpu().contiguous() for name, part in self.stored.items()}
        return stored | {_DEVIATIONS: stored[_DEVIATIONS].float()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Swag:
        """The inverse of to_tensors."""
        return cls.of(tensors[_VARIANCES], tensors[_DEVIATIONS], float(tensors[_SCALE]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Swag:
        """A copy elsewhere or in another precision; what is stored stays as it is."""
        changed = {name: getattr(self, name).to(device=device, dtype=dtype) for name in ("roots", "basis", "spread")}
        return replace(self, **changed)

    def _scaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """x (S, P) (I + Q diag(factors - 1) Q^T)."""
        x = x.to(self.roots)
        return x + ((x @ self.basis) * (factors - 1)) @ self.basis.T
