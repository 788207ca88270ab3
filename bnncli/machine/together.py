"""Work of which each process of a command does its share; where a process works alone, all of it is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import torch
from bnncli.machine.team import Team, team

if TYPE_CHECKING:
    from torch import Tensor

Kind = TypeVar("Kind", bound=np.generic)


def brought_to_leader(own: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]] | None:
    """The parts that all processes have, in the order of their ranks, on the first of them; None on the others.

    Args:
        own: the parts of this one, perhaps none; tensors of the CPU by name.
    """
    others = team()
    if others is None or others.size == 1:
        return list(own)
    if not others.is_leader:
        others.send(list(own), 0).wait()
        return None
    return [*own, *(part for rank in range(1, others.size) for part in others.receive(rank))]


@dataclass(frozen=True)
class Parts:
    """Parts of some work whose results every process needs: each does some of them, or all where they are too few to be shared.

    Args:
        count: how many they are.
    """

    count: int

    @property
    def own(self) -> range:
        """The numbers of those that this process does: early ones, which may be dearer, are for all alike."""
        if (others := self._others) is None:
            return range(self.count)
        return range(others.rank, self.count, others.size)

    def of_all(self, found: NDArray[Kind], sizes: Sequence[int]) -> NDArray[Kind]:
        """What all parts have given, (sum of sizes, ...), in their order.

        Args:
            found: (sum of own sizes, ...), what this process's have given, one behind the other.
            sizes: of each part, perhaps 0.
        """
        if (others := self._others) is None:
            return found
        held = [range(rank, self.count, others.size) for rank in range(others.size)]
        most = max(sum(sizes[part] for part in own) for own in held)
        packed = np.zeros((most, *found.shape[1:]), dtype=found.dtype)
        packed[: len(found)] = found
        parts: dict[int, NDArray[Kind]] = {}
        for own, given in zip(held, others.gather(torch.from_numpy(packed)), strict=True):
            ends = np.cumsum([sizes[part] for part in own])
            parts |= zip(own, np.split(given.numpy(), ends)[:-1], strict=True)
        return np.concatenate([parts[part] for part in range(self.count)])

    @property
    def _others(self) -> Team | None:
        """Those that share the work; None where this process does all of it."""
        others = team()
        return None if others is None or others.size == 1 or self.count < others.size else others
