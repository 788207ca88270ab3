"""Reproducible running sums: CUDA's own add in an unspecified order.

On a GPU they are products with triangular matrices of ones, block by block; the sums before each block are running sums
in turn. PyTorch refuses cumsum there in deterministic mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64  # elements added by one row of a product


def running_sum(values: Tensor) -> Tensor:
    """Return the cumulative sums along the last dimension of floating-point values (..., S)."""
    return values.cumsum(dim=-1) if values.device.type == "cpu" else running_sum_by_products(values)


def running_sum_by_products(values: Tensor) -> Tensor:
    """Return the same by matrix products, on any device."""
    size = values.shape[-1]
    if size <= _BLOCK:
        return values @ _ones_above(size, values)
    pad = torch.nn.functional.pad
    within = pad(values, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK)) @ _ones_above(_BLOCK, values)
    before = pad(running_sum_by_products(within[..., :-1, -1]), (1, 0))
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :size]


def _ones_above(size: int, like: Tensor) -> Tensor:
    """Return ones on and above the diagonal, (size, size)."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).triu()
