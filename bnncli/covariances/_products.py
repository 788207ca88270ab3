"""Products x x^T of feature vectors, packed: the upper triangle, row by row, D (D + 1) / 2 numbers an example.

Weighted Gram matrices under many weights, and quadratic forms under many matrices, are then one matrix product each,
at half the work of full squares.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_products(features: Tensor) -> Tensor:
    """x_i x_j for i <= j, (F (F + 1) / 2, n), of features (n, F)."""
    rows = features.T.contiguous()
    size, num_examples = rows.shape
    out = rows.new_empty(size * (size + 1) // 2, num_examples)
    start = 0
    for i in range(size):
        torch.mul(rows[i:], rows[i], out=out[start : start + size - i])
        start += size - i
    return out


def unpack_symmetric(packed: Tensor, size: int) -> Tensor:
    """Symmetric matrices (..., F, F) of packed upper triangles (..., F (F + 1) / 2)."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    out = packed.new_empty(*packed.shape[:-1], size, size)
    out[..., rows, columns] = packed
    out[..., columns, rows] = packed
    return out


def pack_quadratic_form(matrices: Tensor) -> Tensor:
    """Coefficients (..., F (F + 1) / 2) whose product with packed_products is x^T M x, for M (..., F, F)."""
    rows, columns = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], device=matrices.device)
    both = matrices[..., rows, columns] + matrices[..., columns, rows]
    return torch.where(rows == columns, 0.5 * both, both)
