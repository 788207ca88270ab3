"""Triangular roots of inverses: what the structures that hold whole matrices are made with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from bnncli.errors import NumericError
from bnncli.machine.interruptible import interruptible

Result = TypeVar("Result")

# Relative to the mean diagonal of the precision; beyond the last step the matrix is wrong, not rounded.
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


def inverse_root(precision: Tensor) -> tuple[Tensor, float]:
    """L (..., F, F), lower triangular with L L^T = (precision + jitter I)^{-1}, and the jitter, 0 nearly always.

    Args:
        precision: (..., F, F), symmetric, one matrix or a batch; its diagonal is overwritten when jitter is needed.

    Raises:
        NumericError: when even the largest jitter leaves a matrix without a Cholesky factor, or it is not finite.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    size, added = float(diagonal.mean()), 0.0
    for step in JITTERS:
        diagonal += step * size - added
        added = step * size
        # With the order of the parameters reversed, the inverse of the factor is lower triangular again.
        root, failed = _long(precision, 1 / 3, lambda: torch.linalg.cholesky_ex(precision.flip(-2, -1)))
        if not failed.any():
            root = root.flip(-2, -1)
            root = _long(precision, 1, partial(_inverse_transposed, root))
            if torch.isfinite(root).all():
                return root, added
    if not torch.isfinite(precision).all():
        raise NumericError("the posterior precision is not finite", hint="check the inputs")
    raise NumericError(
        "the posterior precision is not positive definite",
        hint="use a larger \0prior_precision\0, or \0structure\0 kron",
    )


def _long(matrices: Tensor, share: float, work: Callable[[], Result]) -> Result:
    """The work on matrices (..., F, F), of that share of F^3 operations each."""
    operations = share * matrices.numel() * matrices.shape[-1]
    return interruptible(work, operations=operations, device=matrices.device, name="a Cholesky factorisation")


def _inverse_transposed(upper: Tensor) -> Tensor:
    """The inverse's transpose, (..., F, F), of upper triangular matrices."""
    eye = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    return torch.linalg.solve_triangular(upper, eye, upper=True).mT.contiguous()
