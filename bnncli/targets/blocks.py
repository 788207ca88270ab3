"""Features in blocks of rows on the compute device, wherever they are stored.

Sums over examples are made of a fixed number of shards in a fixed order, so that they are the same for any number of workers."""

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


Sums: TypeAlias = "tuple[Tensor, ...]"


def shard_rows(num_rows: int, num_shards: int) -> list[slice]:
    """The rows of each shard; none is empty: of fewer rows than shards each is one."""
    count = min(num_shards, num_rows)
    return [slice(part.start, part.stop) for part in shares(num_rows, count)] if count else []


def row_slices(num_rows: int, *, most: int, team: Team | None) -> list[slice]:
    """Slices of consecutive rows that are computed each by itself, whichever process does it; all rows in one where it works alone.

    Their ends are the same for any number of processes, and so is what rounding makes of each.

    Args:
        num_rows: of all of them, perhaps none.
        most: rows of a slice, unless that makes more of them than there are shards: with fewer a block is too thin.
    """
    if team is None or num_rows == 0:
        return [slice(0, num_rows)]
    return shard_rows(num_rows, min(team.num_shards, math.ceil(num_rows / most)))


@dataclass
class TreeSum:
    """The nodes of the tree over shards begin..end that are known: the fewest that cover them, from the left.

    Attributes:
        nodes: (level, place, sums); a node of level l at place i covers the shards i 2^l to (i + 1) 2^l - 1.
    """

    nodes: list[tuple[int, int, Sums]] = field(default_factory=list)

    def add(self, level: int, place: int, sums: Sums) -> None:
        """Takes in the node to the right of those that are known; sums may be changed afterwards."""
        while self.nodes and place % 2 == 1 and self.nodes[-1][:2] == (level, place - 1):
            left = self.nodes.pop()[2]
            sums = tuple(one.add_(other) for one, other in zip(left, sums, strict=True))
            level, place = level + 1, place // 2
        self.nodes.append((level, place, sums))

    def total(self) -> Sums:
        """The sum of all nodes, from the right, where the shards are not a power of two."""
        *rest, (_, _, found) = self.nodes
        for _, _, sums in reversed(rest):
            found = tuple(one.add_(other) for one, other in zip(sums, found, strict=True))
        return found


def node_places(shards: range) -> list[tuple[int, int]]:
    """Level and place of the fewest nodes that cover these shards, from the left."""
    tree = TreeSum()
    for shard in shards:
        tree.add(0, shard, ())
    return [(level, place) for level, place, _ in tree.nodes]


def summed(shards: Iterable[tuple[int, Sums]]) -> TreeSum:
    """The nodes of shards' sums, each with its number, from the left."""
    tree = TreeSum()
    for shard, sums in shards:
        tree.add(0, shard, sums)
    return tree


def gathered(own: TreeSum, shape_of: Sums, num_shards: int, team: Team) -> Sums:
    """The sum over all shards, the same on every worker.

    Args:
        own: this worker's nodes, of its share of the shards; it may have none.
        shape_of: tensors of the sums' shapes and types.
        num_shards: of all workers together.
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
