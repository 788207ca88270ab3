"""Batches of features that a GPU has no room for: gathered in pinned memory, so that the host waits for no copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES = 2**26  # of one buffer at most


class PinnedRows:
    """Rows on their way to a GPU: some are gathered while those before travel.

    Args:
        features: (N, D) on the CPU, of any floating type.
        device: the GPU.
    """

    def __init__(self, features: Tensor, device: torch.device) -> None:
        self.features, self.device = features, device
        self._most = max(1, _PIECE_BYTES // (features.shape[1] * features.element_size()))
        self._pinned = [self._buffer(0) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def take(self, rows: slice | Tensor) -> Tensor:
        """Rows (n, D) on the GPU, of the features' type; indices (n,) int64 on the CPU, or the host waits for them."""
        chosen = self.features[rows] if isinstance(rows, slice) else rows.cpu()
        moved = torch.empty((len(chosen), self.features.shape[1]), dtype=self.features.dtype, device=self.device)
        for to, piece in zip(moved.split(self._most), chosen.split(self._most), strict=True):
            turn, self._turn = self._turn, 1 - self._turn
            self._copied[turn].synchronize()  # the buffer is free once its last copy is done
            if len(self._pinned[turn]) < len(piece):
                self._pinned[turn] = self._buffer(len(piece))
            gathered = self._pinned[turn][: len(piece)]
            if isinstance(rows, slice):
                gathered.copy_(piece)
            else:
                torch.index_select(self.features, 0, piece, out=gathered)
            to.copy_(gathered, non_blocking=True)
            self._copied[turn].record(torch.cuda.current_stream(self.device))
        return moved

    def _buffer(self, num_rows: int) -> Tensor:
        return torch.empty((num_rows, self.features.shape[1]), dtype=self.features.dtype, pin_memory=True)
