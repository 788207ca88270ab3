"""Workers of one command as threads of one process: the same meetings, without the seconds that processes take to start."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from bnncli.system.workers import Team

Given = TypeVar("Given")


class Room:
    """Where so many threads put down what they have, and see what the others have."""

    def __init__(self, size: int) -> None:
        self._boxes: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def shared(self, rank: int, value: Any) -> list[Any]:
        """What each has put down, in the order of ranks. A thread that never comes breaks the barrier for all."""
        self._boxes[rank] = value
        self._barrier.wait(timeout=20)
        found = [copy.deepcopy(one) for one in self._boxes]  # as processes have their own
        self._barrier.wait(timeout=20)
        return found


@dataclass(frozen=True)
class TeamOfThreads(Team):
    """One of them."""

    room: Room = field(kw_only=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self.room.shared(self.rank, tensor)

    def broadcast(self, tensor: Tensor, *, owner: int) -> Tensor:
        return tensor.copy_(self.room.shared(self.rank, tensor)[owner])

    def gather_objects(self, value: Given, *, to_all: bool = True) -> list[Given]:
        found = self.room.shared(self.rank, value)
        return found if to_all or self.is_leader else []

    def told_by(self, rank: int, value: Any) -> Any:
        return self.room.shared(self.rank, value)[rank]


def in_threads(size: int, work: Callable[[Team], Given]) -> list[Given | Exception]:
    """What the work of each gave or raised."""
    room = Room(size)

    def outcome(rank: int) -> Given | Exception:
        try:
            return work(TeamOfThreads(rank, size, room=room))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(outcome, range(size)))
