"""The processes that share one command's work, as torchrun starts them: which of them this is, and what they tell each other.

All of them run the same command in step. Sums over the examples are shared out (targets/shards.py); everything else each of
them does for itself, from the same numbers, so that they stay in step without being told. The first one alone writes,
holds locks and talks.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.machine.heartbeats import Heartbeats, leave_at_once

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = datetime.timedelta(minutes=30)  # that workers wait for each other


@dataclass(frozen=True)
class Team:
    """The processes of one command.

    Args:
        rank: of this one, from 0 on.
        size: how many they are.
        num_shards: into how many parts the examples are split, whatever the size: the sums of these are added in a fixed order.
    """

    rank: int
    size: int
    num_shards: int = 64

    @property
    def is_leader(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    @property
    def num_here(self) -> int:
        """How many of them are on this machine."""
        return min(self.size, max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.size))))

    def share(self, count: int) -> range:
        """Which of so many parts are this process's."""
        return shares(count, self.size)[self.rank]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, which are of one shape and type, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _speaking():
            torch.distributed.all_gather(found, tensor.contiguous())
        _sent[0] += tensor.numel() * tensor.element_size() * (self.size - 1)
        return found

    def told_by_leader(self, value: Any) -> Any:
        """What the first process has as `value`."""
        if self.size == 1:
            return value
        box = [value]
        with _speaking():
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]


_team: list[Team] = []
_beats: list[Heartbeats] = []
_sent = [0]


def shares(count: int, size: int) -> list[range]:
    """Consecutive ranges of `count` parts, one a process, as even as can be."""
    return [range(rank * count // size, (rank + 1) * count // size) for rank in range(size)]


def rank_and_size() -> tuple[int, int] | None:
    """What torchrun has told this process; None where it was not started by that."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if "MASTER_ADDR" in os.environ and 0 <= rank < size else None


def join(team: Team, device: torch.device) -> None:
    """Meet the others, where there are others. Raises DeviceError where they do not come."""
    if team.size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _speaking():
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=PATIENCE))
            torch.distributed.init_process_group(
                backend, store=store, rank=team.rank, world_size=team.size, timeout=PATIENCE
            )
        _beats[:] = [Heartbeats(store, team.rank, team.size, leave_at_once)]
        _beats[0].start()
    _team[:] = [team]


def leave() -> None:
    """Part from the others: whoever still waits for this process is told that it is gone."""
    if _team and _team.pop().size > 1:
        _beats.pop().stop()
        torch.distributed.destroy_process_group()


def team() -> Team | None:
    """Those that this process has joined; None where it works alone."""
    return _team[0] if _team else None


def is_leader() -> bool:
    """Whether this process writes: it is alone, or the first."""
    return not _team or _team[0].is_leader


def bytes_sent() -> int:
    """What this process has sent so far of tensors."""
    return _sent[0]


class _speaking:
    """A conversation with the others, whose end is an error of ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):  # of torch.distributed, all of them
            mine = _team[0].rank if _team else os.environ.get("RANK")
            raise DeviceError(
                f"worker {mine} has lost the others: one of them has ended", code="worker_lost"
            ) from error
