"""Inputs of a latent binary network: rows of features wherever they lie, standardised on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from bnncli.lazy import torch
from bnncli.targets.stream import FeatureBlocks

if TYPE_CHECKING:
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
        blocks, double = FeatureBlocks(features, device), torch.float64
        sums = [block.sum(dim=0) for _, block in blocks.read(rows, double)]
        mean = torch.stack(sums).sum(dim=0) / len(features)
        squares = [(block - mean).square_().sum(dim=0) for _, block in blocks.read(rows, double)]
        sd = (torch.stack(squares).sum(dim=0) / len(features)).sqrt().float()
        # Less than float32's normal numbers counts as none: its reciprocal may be infinite.
        sd = torch.where(sd > torch.finfo(sd.dtype).tiny, sd, 1.0)
        return cls(mean.float(), sd)


class Inputs(NamedTuple):
    """The inputs of all examples: features wherever they lie, and how they are scaled on their way; not at all by default."""

    features: FeatureBlocks
    scaling: Scaling | None = None

    def gather(self, rows: slice | Tensor) -> Tensor:
        """Those of some rows, (n, D) float32 on the device; an index (n,) int64 is best where the features are."""
        return self._scaled(self.features.gather(rows, torch.float32))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, and their inputs (n, D), to be used without gradients: few at a time stay in a CPU's cache."""
        size = _ROWS["cpu" if self.features.device.type == "cpu" else "cuda"]
        for rows, block in self.features.read(size, torch.float32):
            yield rows, self._scaled(block)

    def _scaled(self, features: Tensor) -> Tensor:
        return features if self.scaling is None else self.scaling(features)
