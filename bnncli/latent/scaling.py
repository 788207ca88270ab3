"""Inputs of a latent binary network: rows of features wherever they lie, standardised on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK_BYTES = 2**26  # of features in float64 at a time
_ROWS = {"cpu": 1000, "cuda": 20_000}


class Scaling(NamedTuple):
    """x -> (x - shift) / scale; (D,) float32 each."""

    shift: Tensor
    scale: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Features (n, D), standardised."""
        return (features - self.shift) / self.scale

    @classmethod
    def of(cls, features: Tensor, device: torch.device) -> Scaling:
        """Mean and standard deviation of each column of features (N, D); 1 for one that never varies.

        Two passes in blocks, sums in float64: of float32 values that are all equal they are exact, and the deviation is 0.
        """
        rows = max(1, _BLOCK_BYTES // (8 * features.shape[1]))
        mean = torch.stack([block.double().sum(dim=0) for block in features.split(rows)]).sum(dim=0) / len(features)
        squares = [(block.double() - mean).square_().sum(dim=0) for block in features.split(rows)]
        sd = (torch.stack(squares).sum(dim=0) / len(features)).sqrt().float()
        # Less than float32's normal numbers counts as none: its reciprocal may be infinite.
        sd = torch.where(sd > torch.finfo(sd.dtype).tiny, sd, 1.0)
        return cls(mean.float().to(device), sd.to(device))


def take(features: Tensor, rows: slice | Tensor, device: torch.device, scaling: Scaling | None) -> Tensor:
    """Rows (n, D) float32 of features (N, D) on the device, standardised where a scaling is given.

    Args:
        features: on the device, or on the CPU where they are too many for it, of any floating type.
        rows: a slice, or indices (n,) int64 on any device.
    """
    found = features[rows] if isinstance(rows, slice) else features.index_select(0, rows.to(features.device))
    found = found.to(device=device, dtype=torch.float32)
    return found if scaling is None else scaling(found)


def row_blocks(features: Tensor, device: torch.device) -> Iterator[slice]:
    """Slices of rows to take at a time, without gradients: small ones stay in a CPU's cache."""
    size = _ROWS["cpu" if device.type == "cpu" else "cuda"]
    for first in range(0, len(features), size):
        yield slice(first, first + size)
