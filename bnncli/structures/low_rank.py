"""The low-rank structure: the largest eigenvalues of H with their eigenvectors, without a P x P matrix.

The Lanczos method finds them. Each step takes one product with H, a pass over the data. Every step orthogonalises
against the whole basis (Golub and Van Loan (2013), Matrix Computations, 10.3), so that no eigenvalue is found twice. If
the basis becomes invariant, the steps continue in its orthogonal complement (Meyer et al. (2021), arXiv:2010.09649).

Sigma = (U^T S U + Lambda)^{-1} by the Woodbury identity, for any prior. With U (r, P), S diagonal, and Q (P, r) and
c^{1/2} the left singular vectors and the singular values of Lambda^{-1/2} U^T S^{1/2}, the precision is Lambda^{1/2} (I
+ Q diag(c) Q^T) Lambda^{1/2}, and L = Lambda^{-1/2} (I + Q diag((1 + c)^{-1/2} - 1) Q^T) satisfies L L^T = Sigma
exactly. Outside the r directions it is the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.system import signals

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


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


_NUM_PROBES = 8
_SEED = 0  # of the first direction and of the probes; the eigenvectors hardly depend on it
_EXTRA = 20  # steps beyond three per eigenvector before stopping without convergence
_TOLERANCE = 1e-3  # of an eigenvector's residual, relative to its eigenvalue
_INVARIANT = 1e-7  # length of a step, relative to the largest eigenvalue, that is only rounding


class NetworkLowRank:
    """`hessian.low-rank.vectors` (r, P), `.values` (r,), and `.trace` (2,): the estimate and its standard error."""

    order: ClassVar[int] = 50
    about: ClassVar[str] = "the \0rank\0 largest eigenvalues"
    kinds: ClassVar[tuple[str, ...]] = ("ggn",)
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the largest `rank` eigenvalues and their eigenvectors, orthonormal rows, float64."""
        multiply = target.ggn_operator(theta)
        size = target.layout.num_params
        generator = torch.Generator().manual_seed(_SEED)
        values, vectors = largest_eigenpairs(
            lambda vector: multiply(vector.unsqueeze(0))[0],
            size,
            min(target.choice.low_rank, size),
            generator,
            target.device,
        )
        rest, error = _trace_outside(multiply, vectors, generator)
        trace = torch.tensor([float(values.sum()) + rest, error], dtype=torch.float64)
        parts = {"vectors": vectors, "values": values, "trace": trace}
        return {f"hessian.low-rank.{name}": part for name, part in parts.items()}

    @staticmethod
    def metrics(hessian: dict[str, Tensor]) -> dict[str, Any]:
        """Return the rank, its share of the trace of H, and the share's standard error."""
        values = hessian["hessian.low-rank.values"]
        trace, error = hessian["hessian.low-rank.trace"].tolist()
        captured = float(values.sum())
        share = captured / trace if trace > 0 else 1.0
        return {
            "rank": len(values),
            "captured_trace": share,
            "captured_trace_standard_error": share * error / trace if trace > 0 else 0.0,
        }

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return P times the default rank."""
        from bnncli.targets.curvature_choice import DEFAULT_RANK

        return min(DEFAULT_RANK, layout.num_params) * layout.num_params


def largest_eigenpairs(
    multiply: Callable[[Tensor], Tensor], size: int, count: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues (r,), descending and not negative, and their eigenvectors (r, P) in rows, float64.

    Args:
        multiply: multiplies a vector (P,) by a positive semidefinite matrix (P, P).
        size: P.
        count: r.
        generator: of the first direction, on the CPU.

    Raises:
        NumericError: the matrix is not finite.
    """
    most = min(size, 3 * count + _EXTRA)
    basis = torch.zeros(most, size, dtype=torch.float64, device=device)
    projected = torch.zeros(most, most, dtype=torch.float64)
    basis[0] = _direction(basis[:0], generator)
    largest = 0.0
    for step in range(most):
        signals.raise_if_interrupted("the search for eigenvectors")
        product = multiply(basis[step]).double()
        projected[step, step] = along = float(basis[step] @ product)
        if not math.isfinite(along):
            raise NumericError("the Hessian is not finite", hint="check the inputs")
        remainder = _orthogonal(product, basis[: step + 1])
        length = float(remainder.norm())
        largest = max(largest, abs(float(projected[step, step])))
        is_invariant = length <= _INVARIANT * largest
        if step + 1 == most or (step + 1 >= count and _has_converged(projected[: step + 1, : step + 1], length, count)):
            break
        if is_invariant:
            basis[step + 1] = _direction(basis[: step + 1], generator)
        else:
            basis[step + 1] = remainder / length
            projected[step, step + 1] = projected[step + 1, step] = length
    taken = slice(0, step + 1)
    values, rotations = torch.linalg.eigh(projected[taken, taken])
    order = values.argsort(descending=True)[:count]
    return values[order].clamp_min(0).to(device), rotations[:, order].T.to(device) @ basis[taken]


def _has_converged(projected: Tensor, length: float, count: int) -> bool:
    """Return whether the residuals are small: the next step's length times each eigenvector's last coordinate."""
    values, rotations = torch.linalg.eigh(projected)
    residuals = length * rotations[-1].abs()
    return bool((residuals <= _TOLERANCE * values.abs())[-count:].all())


def _orthogonal(vector: Tensor, basis: Tensor) -> Tensor:
    """Return the part of a vector (P,) orthogonal to orthonormal rows (m, P); projects twice to remove rounding errors."""
    for _ in range(2):
        vector = vector - (basis @ vector) @ basis
    return vector


def _direction(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random unit vector (P,) orthogonal to orthonormal rows (m, P)."""
    vector = torch.randn(basis.shape[1], dtype=torch.float64, generator=generator).to(basis.device)
    vector = _orthogonal(vector, basis)
    return vector / vector.norm()


def _trace_outside(
    multiply: Callable[[Tensor], Tensor], vectors: Tensor, generator: torch.Generator
) -> tuple[float, float]:
    """Estimate the trace of H outside orthonormal rows (r, P), with its standard error; exact if little is outside."""
    size = vectors.shape[1]
    if len(vectors) == size:
        return 0.0, 0.0
    signs = torch.randint(2, (_NUM_PROBES, size), generator=generator, dtype=torch.int8) * 2 - 1
    probes = signs.to(vectors)
    probes = probes - (probes @ vectors.T) @ vectors
    found = (probes * multiply(probes).double()).sum(dim=1).clamp_min(0)
    return float(found.mean()), float(found.std()) * _NUM_PROBES**-0.5
