"""Features in blocks of rows on the compute device, wherever they lie: in its memory, in the CPU's, or in a file.

Sums over the examples are taken block by block, so that nothing of the size of the data is made. Where the features do
not fit the GPU, blocks travel through two pinned buffers on a stream of their own, while the block before is at work.
How long a block is follows from sizes and the kind of device alone, and its ends are the same wherever the features lie:
sums have the same bits whatever memory is free. Only where the device refuses the memory for a block is it halved, and the
pass goes on with the rows that are not done: that rounds the sums otherwise, in their last digits, and is better than to end.
Not so while a graph is captured, whose memory it then is that there is too little of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.machine.team import team
from bnncli.targets.pinned_rows import PinnedRows
from bnncli.targets.shards import gathered, shard_rows, summed

if TYPE_CHECKING:
    from torch import Tensor

Work: TypeAlias = "Callable[[slice, Tensor], tuple[Tensor, ...]]"

# Elements of the largest intermediate, rows times columns. Measured on two cores: blocks of about 2 MB stay in cache; a
# GPU wants few, large kernels.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
# A block's sum has as many elements for each column as there are features, which are written and added up: of 2 D rows and more
# that costs little beside the products, and pays up to blocks of this many elements (K = 1,000, D = 1,280: a sixth).
_WIDE_BLOCK_ELEMENTS = 2**22
TRANSFER_BYTES = 2**26  # of one pinned buffer: long enough for the full speed of the bus


@dataclass
class FeatureBlocks:
    """Features (N, D) to be read in blocks of rows.

    Args:
        features: (N, D), of any floating-point type, on the compute device or on the CPU (a mapped file, perhaps).
        device: where blocks are needed.
        divisor: by how much blocks had to become smaller for the device's memory; grows with every refusal.
    """

    features: Tensor
    device: torch.device
    divisor: int = 1
    _pinned: PinnedRows | None = field(default=None, init=False, repr=False, compare=False)

    def sum(self, work: Work, *, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The sums over all blocks of what `work` returns for each; arguments as for `map`.

        Of a team's shards, each worker's own, and then of all workers: the same for any number of them.
        """

        def sum_of(rows: slice) -> tuple[Tensor, ...]:
            total: tuple[Tensor, ...] = ()
            for parts in self.map(work, columns=columns, dtype=dtype, within=rows):
                total = tuple(sum_.add_(part) for sum_, part in zip(total, parts, strict=True)) if total else parts
            return total

        everything = slice(0, self.features.shape[0])
        if (others := team()) is None or not len(self.features):
            return sum_of(everything)
        rows = shard_rows(everything.stop, others.num_shards)
        own = summed((shard, sum_of(rows[shard])) for shard in others.share(len(rows)))
        shape_of = own.nodes[0][2] if own.nodes else sum_of(slice(0, 1))
        return gathered(own, shape_of, len(rows), others)

    def map(
        self, work: Work, *, columns: int, dtype: torch.dtype, within: slice | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """What `work` returns for each block, in the order of the rows.

        Args:
            work: takes a slice of rows and their features (n, D); returns new tensors, and changes nothing else.
            columns: elements a row of its largest intermediate.
            dtype: precision that it takes features in.
            within: the rows start..stop that are read; all by default.

        Raises:
            DeviceError: when not even one row fits in the device's memory.
            torch.OutOfMemoryError: when a block does not, in the capture of a graph.
        """
        num_rows, num_features = self.features.shape
        start, stop = (0, num_rows) if within is None else (within.start, within.stop)
        if dtype != self.features.dtype or self.device.type != "cpu":  # the block is itself an intermediate, or travels
            columns = max(columns, num_features)
        while start < stop:
            size = max(1, _block_rows(columns, num_features, self.device) // self.divisor)
            try:
                for rows, block in self._blocks(start, stop, size):
                    parts = work(rows, block.to(dtype))
                    start = rows.stop
                    yield parts
            except torch.OutOfMemoryError as error:
                if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise  # nothing can be given back there, and what has failed would be replayed
                if size == 1:
                    raise DeviceError(
                        f"{self.device}: out of memory even with a block of one example ({columns} columns)",
                        code="out_of_memory",
                    ) from error
            else:
                return
            self.divisor *= 2  # only now are the tensors of the failed block free
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def read(self, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, at most `size` at a time, with their features (n, D), which the next ones may overwrite."""
        for rows, block in self._blocks(0, self.features.shape[0], size):
            yield rows, block.to(dtype)

    def gather(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows (B, D) on the compute device.

        Args:
            rows: a slice, or an index (B,) int64: on any device; where features travel to a GPU the host waits for an
                index on that, and for nothing else.
            dtype: precision to have them in.
        """
        if self.features.device.type == "cpu" and self.device.type != "cpu":
            self._pinned = self._pinned or PinnedRows(self.features, self.device)
            return self._pinned.take(rows).to(dtype)
        if isinstance(rows, slice):
            return self.features[rows].to(self.device, dtype)
        return self.features.index_select(0, rows.to(self.features.device)).to(self.device, dtype)

    def _blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of at most `size` rows, start..stop together, with their features on the device."""
        if self.features.device == self.device:
            for rows in slices(start, stop, size):
                yield rows, self.features[rows]
            return
        for chunk, block in self._transfers(start, stop, size):
            for rows in slices(chunk.start, chunk.stop, size):
                yield rows, block[rows.start - chunk.start : rows.stop - chunk.start]

    def _transfers(self, start: int, stop: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of `size` rows or a multiple of them and their features, copied to the GPU while the ones before are in use."""
        num_features = self.features.shape[1]
        row_bytes = num_features * self.features.element_size()
        # Whole blocks, or they would end elsewhere than on the GPU.
        whole = TRANSFER_BYTES // self.divisor // row_bytes // size * size
        length = min(max(size, whole), stop - start)
        shape = (length, num_features)
        pinned = [torch.empty(shape, dtype=self.features.dtype, pin_memory=True) for _ in range(2)]
        on_device = [torch.empty(shape, dtype=self.features.dtype, device=self.device) for _ in range(2)]
        copied, used = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))
        copying, working = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        copying.wait_stream(
            working
        )  # the buffers' memory may be in use by work queued before; it goes back the same way
        for count, rows in enumerate(slices(start, stop, length)):
            turn, here = count % 2, slice(0, rows.stop - rows.start)
            copied[turn].synchronize()  # the pinned buffer is free once its last copy is done
            pinned[turn][here].copy_(self.features[rows])
            with torch.cuda.stream(copying):
                copying.wait_event(used[turn])
                on_device[turn][here].copy_(pinned[turn][here], non_blocking=True)
                copied[turn].record(copying)
            working.wait_event(copied[turn])
            yield rows, on_device[turn][here]
            used[turn].record(working)


def _block_rows(columns: int, num_features: int, device: torch.device) -> int:
    """How many rows of so many columns make a good block for sums over features."""
    wide = min(2 * num_features, _WIDE_BLOCK_ELEMENTS // columns)
    return max(BLOCK_ELEMENTS.get(device.type, 2**19) // columns, wide)


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size`, covering range(start, stop)."""
    return (slice(begin, min(begin + size, stop)) for begin in range(start, stop, size))
