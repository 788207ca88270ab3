"""Triangular roots of inverses: what the structures that hold whole matrices are made with."""

from __future__ import annotations

import torch
from torch import Tensor

from bnncli.errors import NumericError

# Relative to the mean diagonal of the precision; beyond the last step the matrix is wrong, not rounded.
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


def inverse_root(precision: Tensor) -> tuple[Tensor, float]:
    """L (..., F, F), lower triangular with L L^T = (precision + jitter I)^{-1}, and the jitter, 0 nearly always.

    Args:
        precision: (..., F, F), symmetric, one matrix or a batch; its diagonal is overwritten when jitter is needed.

    Raises:
        NumericError: when even the largest jitter leaves a matrix without a Cholesky factor.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    size, added = float(diagonal.mean()), 0.0
    for step in JITTERS:
        diagonal += step * size - added
        added = step * size
        # With the order of the parameters reversed, the inverse of the factor is lower triangular again.
        root, failed = torch.linalg.cholesky_ex(precision.flip(-2, -1))
        if not failed.any():
            root = root.flip(-2, -1)
            eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
            root = torch.linalg.solve_triangular(root, eye, upper=True).mT.contiguous()
            if torch.isfinite(root).all():
                return root, added
    raise NumericError(
        "the posterior precision is not positive definite",
        hint="use a larger --prior-precision, or --structure kron",
    )
