"""Batches of features that a GPU has no room for: gathered in pinned memory, so that the host waits for no copy."""

from __future__ import annotations

import torch
from torch import Tensor


class PinnedRows:
    """Batches on their way to a GPU: one is gathered while the one before travels.

    Args:
        features: (N, D) on the CPU, of any floating type.
        device: the GPU.
        batch_size: rows of the largest batch.
    """

    def __init__(self, features: Tensor, device: torch.device, batch_size: int) -> None:
        self.features, self.device = features, device
        shape = (batch_size, features.shape[1])
        self._pinned = [torch.empty(shape, dtype=features.dtype, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def take(self, rows: slice | Tensor) -> Tensor:
        """Rows (n, D) on the GPU, of the features' type; indices (n,) int64 lie on the CPU."""
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()  # the buffer is free once its last copy is done
        if isinstance(rows, slice):
            found = self.features[rows]
            gathered = self._pinned[turn][: len(found)].copy_(found)
        else:
            gathered = torch.index_select(self.features, 0, rows, out=self._pinned[turn][: len(rows)])
        moved = gathered.to(self.device, non_blocking=True)
        self._copied[turn].record(torch.cuda.current_stream(self.device))
        return moved
