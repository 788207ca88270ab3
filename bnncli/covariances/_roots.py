"""Triangular roots of inverses, for the structures that hold dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from bnncli.covariances._panels import panelled_root
from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.system.memory import is_large
from bnncli.system.signals import interruptible
from bnncli.system.workers import Team, team

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
Rows: TypeAlias = "Callable[[int, int], Tensor]"  # rows start..stop of a symmetric matrix (F, F), (stop - start, F)

_LOOK = 256  # rows checked at a time

# Relative to the mean diagonal of the precision; a matrix that needs more is wrong, not rounded.
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


def inverse_root(precision: Tensor) -> tuple[Tensor, float]:
    """Return L (..., F, F), lower triangular with L L^T = (precision + jitter I)^{-1}, and the jitter, nearly always 0.

    Args:
        precision: (..., F, F), float64, symmetric, one matrix or a batch; its diagonal is overwritten if jitter is
            needed.

    Raises:
        NumericError: a matrix is not finite, or has no Cholesky factor even with the largest jitter.
    """
    if precision.ndim == 2 and is_large(len(precision)):
        zero = precision.new_zeros(len(precision))
        return root_of_sum(lambda start, stop: precision[start:stop], zero, mean=float(precision.diagonal().mean()))
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    size, before = float(diagonal.mean()), [0.0]

    def root(added: float) -> Tensor | None:
        diagonal.add_(added - before[0])
        before[0] = added
        # With the parameters in reversed order, the inverse of the factor is lower triangular again.
        root, failed = _long(precision, 1 / 3, lambda: torch.linalg.cholesky_ex(precision.flip(-2, -1)))
        return None if failed.any() else _long(precision, 1, partial(_inverse_transposed, root.flip(-2, -1)))

    return _jittered(root, size, is_finite=lambda: bool(torch.isfinite(precision).all()))


def root_of_sum(rows: Rows, diagonal: Tensor, *, mean: float) -> tuple[Tensor, float]:
    """Return the root of the inverse of a large matrix plus a diagonal (F,), by panels distributed over the workers.

    Args:
        rows: rows of the matrix.
        mean: mean diagonal of the sum.
    """
    size, workers = len(diagonal), team() or Team(0, 1)

    def root(added: float) -> Tensor | None:
        def columns(start: int, stop: int) -> Tensor:
            part = rows(size - stop, size - start)[:, : size - start].flip(0, 1).T.contiguous()
            part.diagonal().add_(diagonal[size - stop : size - start].flip(0) + added)
            return part

        return panelled_root(columns, size, workers, device=diagonal.device)

    return _jittered(
        root, mean, is_finite=lambda: all(_is_finite(rows, start, size) for start in range(0, size, _LOOK))
    )


def _is_finite(rows: Rows, start: int, size: int) -> bool:
    return bool(torch.isfinite(rows(start, min(start + _LOOK, size))).all())


def _jittered(
    root: Callable[[float], Tensor | None], size: float, *, is_finite: Callable[[], bool]
) -> tuple[Tensor, float]:
    """Return the first root that exists and the jitter added to the diagonal. Raises NumericError if there is none."""
    if math.isfinite(size):  # a matrix with infinite entries can have a root of zeros
        for step in JITTERS:
            found = root(step * size)
            if found is not None and math.isfinite(float(found.sum())):  # torch.isfinite would copy a large matrix
                return found, step * size
    if not math.isfinite(size) or not is_finite():
        raise NumericError("the posterior precision is not finite", hint="check the inputs")
    raise NumericError(
        "the posterior precision is not positive definite",
        hint="use a larger \0prior_precision\0, or \0structure\0 kron",
    )


def _long(matrices: Tensor, share: float, work: Callable[[], Result]) -> Result:
    """Run interruptible work on matrices (..., F, F), of `share` * F^3 operations each."""
    operations = share * matrices.numel() * matrices.shape[-1]
    return interruptible(work, operations=operations, device=matrices.device, name="a Cholesky factorisation")


def _inverse_transposed(upper: Tensor) -> Tensor:
    """Return the transposed inverse, (..., F, F), of upper triangular matrices."""
    eye = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    return torch.linalg.solve_triangular(upper, eye, upper=True).mT.contiguous()
