"""Running sums that come out the same in every run: CUDA's own adds in an order that it does not promise.

On a GPU they are products with triangular matrices of ones, block by block, and the sums before each block are running sums
again. PyTorch refuses cumsum there where deterministic kernels are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64  # elements that one row of a product adds


def running_sum(values: Tensor) -> Tensor:
    """The sums of the first 1, 2, ... elements along the last dimension of floating-point values (..., S), (..., S)."""
    return values.cumsum(dim=-1) if values.device.type == "cpu" else by_products(values)


def by_products(values: Tensor) -> Tensor:
    """The same by matrix products, on any device."""
    size = values.shape[-1]
    if size <= _BLOCK:
        return values @ _ones_above(size, values)
    pad = torch.nn.functional.pad
    within = pad(values, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK)) @ _ones_above(_BLOCK, values)
    before = pad(by_products(within[..., :-1, -1]), (1, 0))
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :size]


def _ones_above(size: int, like: Tensor) -> Tensor:
    """Ones on and above the diagonal, (size, size)."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).triu()
