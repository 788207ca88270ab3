"""Sums over the examples that are the same for any number of workers: of a fixed number of shards, added in a fixed order.

Shards are consecutive rows. Their sums are the leaves of a binary tree, whose every node is its left part plus its right one;
which worker makes a node changes nothing of it. A worker adds up its own shards as far as whole nodes go, about two for each
level at most, and sends these: not a sum for each shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bnncli.machine.team import Team, shares

if TYPE_CHECKING:
    from torch import Tensor

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
