"""Features in blocks of rows on the compute device, wherever they are stored.

Sums over examples use a fixed number of shards in a fixed order, so that they are equal for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.system.workers import Team, shares, team

if TYPE_CHECKING:
    from torch import Tensor


_PIECE_BYTES = 2**26  # limit per buffer


class PinnedRows:
    """Copies rows to a GPU, gathering the next ones during the transfer.

    Args:
        features: (N, D) on the CPU, of any floating-point type.
        device: the GPU.
    """

    def __init__(self, features: Tensor, device: torch.device) -> None:
        self.features, self.device = features, device
        self._most = max(1, _PIECE_BYTES // (features.shape[1] * features.element_size()))
        self._pinned = [self._buffer(0) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def take(self, rows: slice | Tensor) -> Tensor:
        """Return rows (n, D) on the GPU, in the features' type; indices (n,) int64 should be on the CPU to avoid a sync."""
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


Work: TypeAlias = "Callable[[slice, Tensor], tuple[Tensor, ...]]"

# Elements of the largest intermediate, rows times columns. Measured on two cores: blocks of about 2 MB stay in cache; a
# GPU wants few, large kernels.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
# A block's sum has one element per column and feature, which must be written and added. With 2 D rows or more this
# costs little beside the products, and pays off up to blocks of this many elements (K = 1,000, D = 1,280: a sixth).
_WIDE_BLOCK_ELEMENTS = 2**22
TRANSFER_BYTES = 2**26  # per pinned buffer: long enough for the bus's full speed


@dataclass
class FeatureBlocks:
    """Features (N, D), read in blocks of rows.

    Args:
        features: (N, D), of any floating-point type, on the compute device or the CPU (possibly memory-mapped).
        device: where blocks are needed.
        divisor: factor by which blocks were shrunk to fit the device's memory; grows with every failure.
    """

    features: Tensor
    device: torch.device
    divisor: int = 1
    _pinned: PinnedRows | None = field(default=None, init=False, repr=False, compare=False)

    def sum(self, work: Work, *, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the sums over all blocks of what `work` returns; arguments as in `map`.

        Each worker of a team sums its own shards first, so that the result is the same for any number of workers.
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
        own = sum_shards((shard, sum_of(rows[shard])) for shard in others.share(len(rows)))
        shape_of = own.nodes[0][2] if own.nodes else sum_of(slice(0, 1))
        return gather_sums(own, shape_of, len(rows), others)

    def map(
        self, work: Work, *, columns: int, dtype: torch.dtype, within: slice | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield what `work` returns for each block, in row order.

        Args:
            work: takes a slice of rows and their features (n, D); returns new tensors without side effects.
            columns: elements per row of its largest intermediate.
            dtype: precision in which it takes features.
            within: range of rows to read; all by default.

        Raises:
            DeviceError: not even one row fits into the device's memory.
            torch.OutOfMemoryError: a block does not fit during graph capture.
        """
        num_rows, num_features = self.features.shape
        start, stop = (0, num_rows) if within is None else (within.start, within.stop)
        # the block is itself an intermediate, or is copied
        if dtype != self.features.dtype or self.device.type != "cpu":
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
                    raise  # nothing can be freed there, and the failure would be replayed
                if size == 1:
                    raise DeviceError(
                        f"{self.device}: out of memory even with a block of one example ({columns} columns)",
                        code="out_of_memory",
                    ) from error
            else:
                return
            self.divisor *= 2  # only now are the tensors of the failed block freed
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def read(self, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order, at most `size` at a time, with features (n, D) that the next block may overwrite."""
        for rows, block in self._blocks(0, self.features.shape[0], size):
            yield rows, block.to(dtype)

    def gather(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows (B, D) on the compute device.

        Args:
            rows: a slice, or an index (B,) int64 on any device; if features are copied to a GPU, an index there costs a
                sync.
            dtype: precision of the result.
        """
        if self.features.device.type == "cpu" and self.device.type != "cpu":
            self._pinned = self._pinned or PinnedRows(self.features, self.device)
            return self._pinned.take(rows).to(dtype)
        if isinstance(rows, slice):
            return self.features[rows].to(self.device, dtype)
        return self.features.index_select(0, rows.to(self.features.device)).to(self.device, dtype)

    def _blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of at most `size` rows from start to stop, with their features on the device."""
        if self.features.device == self.device:
            for rows in slices(start, stop, size):
                yield rows, self.features[rows]
            return
        for chunk, block in self._transfers(start, stop, size):
            for rows in slices(chunk.start, chunk.stop, size):
                yield rows, block[rows.start - chunk.start : rows.stop - chunk.start]

    def _transfers(self, start: int, stop: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a multiple of `size` rows with their features, copied to the GPU while earlier ones are in use."""
        num_features = self.features.shape[1]
        row_bytes = num_features * self.features.element_size()
        # Whole blocks; otherwise blocks would end at other rows than on the GPU.
        whole = TRANSFER_BYTES // self.divisor // row_bytes // size * size
        length = min(max(size, whole), stop - start)
        shape = (length, num_features)
        pinned = [torch.empty(shape, dtype=self.features.dtype, pin_memory=True) for _ in range(2)]
        on_device = [torch.empty(shape, dtype=self.features.dtype, device=self.device) for _ in range(2)]
        copied, used = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))
        copying, working = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        copying.wait_stream(
            working
        )  # earlier queued work may still use the buffers' memory; it is freed in stream order
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
    """Return a good number of rows per block for sums over features with this many columns."""
    wide = min(2 * num_features, _WIDE_BLOCK_ELEMENTS // columns)
    return max(BLOCK_ELEMENTS.get(device.type, 2**19) // columns, wide)


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Return consecutive slices of at most `size` that cover range(start, stop)."""
    return (slice(begin, min(begin + size, stop)) for begin in range(start, stop, size))


Sums: TypeAlias = "tuple[Tensor, ...]"


def shard_rows(num_rows: int, num_shards: int) -> list[slice]:
    """Return the rows of each non-empty shard; with fewer rows than shards, one row each."""
    count = min(num_shards, num_rows)
    return [slice(part.start, part.stop) for part in shares(num_rows, count)] if count else []


def row_slices(num_rows: int, *, most: int, team: Team | None) -> list[slice]:
    """Return slices of rows to compute independently, in any process; a single slice without a team.

    Their boundaries, and so the rounding, are the same for any number of processes.

    Args:
        num_rows: total, possibly 0.
        most: rows per slice, unless that gives more slices than shards, which would make blocks too thin.
    """
    if team is None or num_rows == 0:
        return [slice(0, num_rows)]
    return shard_rows(num_rows, min(team.num_shards, math.ceil(num_rows / most)))


@dataclass
class TreeSum:
    """The known nodes of a summation tree over shards begin..end: the fewest that cover them, from the left.

    Attributes:
        nodes: (level, place, sums); node i of level l covers shards i 2^l to (i + 1) 2^l - 1.
    """

    nodes: list[tuple[int, int, Sums]] = field(default_factory=list)

    def add(self, level: int, place: int, sums: Sums) -> None:
        """Add the node to the right of the known ones; sums may be changed."""
        while self.nodes and place % 2 == 1 and self.nodes[-1][:2] == (level, place - 1):
            left = self.nodes.pop()[2]
            sums = tuple(one.add_(other) for one, other in zip(left, sums, strict=True))
            level, place = level + 1, place // 2
        self.nodes.append((level, place, sums))

    def total(self) -> Sums:
        """Return the sum of all nodes, from the right, for a number of shards that is not a power of two."""
        *rest, (_, _, found) = self.nodes
        for _, _, sums in reversed(rest):
            found = tuple(one.add_(other) for one, other in zip(sums, found, strict=True))
        return found


def node_places(shards: range) -> list[tuple[int, int]]:
    """Return level and place of the fewest nodes that cover these shards, from the left."""
    tree = TreeSum()
    for shard in shards:
        tree.add(0, shard, ())
    return [(level, place) for level, place, _ in tree.nodes]


def sum_shards(shards: Iterable[tuple[int, Sums]]) -> TreeSum:
    """Combine the numbered sums of shards into a tree, from the left."""
    tree = TreeSum()
    for shard, sums in shards:
        tree.add(0, shard, sums)
    return tree


def gather_sums(own: TreeSum, shape_of: Sums, num_shards: int, team: Team) -> Sums:
    """Return the sum over all shards, the same on every worker.

    Args:
        own: nodes of this worker's share of the shards, possibly none.
        shape_of: tensors with the sums' shapes and types.
        num_shards: of all workers.
    """
    places = [node_places(part) for part in shares(num_shards, team.size)]
    most = max(map(len, places))
    received: list[list[Tensor]] = []
    for number, like in enumerate(shape_of):
        packed = like.new_zeros((most, *like.shape))
        for row, (_, _, sums) in enumerate(own.nodes):
            packed[row] = sums[number]
        received.append(team.gather(packed))
    tree = TreeSum()
    for rank, held in enumerate(places):
        for row, (level, place) in enumerate(held):
            tree.add(level, place, tuple(parts[rank][row] for parts in received))
    return tree.total()
