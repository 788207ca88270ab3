"""The covariance of SWAG: half a diagonal plus half the sample covariance of a few deviations, times a scale.

Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), arXiv:1902.02476, equation (1): Sigma = s (diag(v) / 2 + D D^T / (2
(R - 1))), D (P, R). With A = (s v / 2)^1/2 and Q (P, R), c^1/2 the left singular vectors and singular values of A^-1 (s
/ (2 (R - 1)))^1/2 D, L = A (I + Q diag((1 + c)^1/2 - 1) Q^T) satisfies L L^T = Sigma exactly. The inverse follows from
the Woodbury identity, the determinant from Sylvester's.
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
        stored: v, D^T and s, by their names in a file.
    """

    structure: ClassVar[str] = "swag"
    roots: Tensor
    basis: Tensor
    spread: Tensor
    stored: dict[str, Tensor]

    @classmethod
    def of(cls, variances: Tensor, deviations: Tensor, scale: float = 1.0) -> Swag:
        """Return Sigma from v (P,), positive, and D^T (R, P), R >= 2."""
        variances, deviations = variances.double(), deviations.double()
        roots = (0.5 * scale * variances).sqrt()
        scaled = deviations * (0.5 * scale / (len(deviations) - 1)) ** 0.5 / roots
        # R is small, so the left singular vectors come from the R x R Gram matrix of the deviations.
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
        """Return z L^T, (S, P)."""
        return self._scaled(z, (1 + self.spread).sqrt()) * self.roots

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._scaled(x.to(self.roots) / self.roots, (1 + self.spread).rsqrt())

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._scaled(gradient.to(self.roots) * self.roots, (1 + self.spread).sqrt())

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.roots.double().log().sum() + 0.5 * self.spread.double().log1p().sum())

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        return self.roots.square() * (1 + self.basis.square() @ self.spread)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return v and s in float64, and D^T in float32, as collected."""
        stored = {name: part.cpu().contiguous() for name, part in self.stored.items()}
        return stored | {_DEVIATIONS: stored[_DEVIATIONS].float()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Swag:
        """Invert to_tensors."""
        return cls.of(tensors[_VARIANCES], tensors[_DEVIATIONS], float(tensors[_SCALE]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Swag:
        """Return a copy on another device or in another precision; stored tensors are unchanged."""
        changed = {name: getattr(self, name).to(device=device, dtype=dtype) for name in ("roots", "basis", "spread")}
        return replace(self, **changed)

    def _scaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """Return x (S, P) times (I + Q diag(factors - 1) Q^T)."""
        x = x.to(self.roots)
        return x + ((x @ self.basis) * (factors - 1)) @ self.basis.T
