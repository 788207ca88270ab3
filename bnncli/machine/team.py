"""The processes that share one command's work, as torchrun starts them: which of them this is, and what they tell each other.

A team runs the same command in step. Sums over the examples are shared out (targets/shards.py), chains (inference/chain_groups.py), and
trainings that are apart (training/shared_out.py); everything else each of them does for itself, from the same numbers, so that they stay
in step without being told. Of a crew the first alone runs the command, as if it had no others, but for what it asks of them. In both the
first one alone writes, holds locks and talks.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import BnnError, DeviceError
from bnncli.lazy import torch
from bnncli.machine.heartbeats import Heartbeats, leave_at_once
from bnncli.machine.last_words import ENDING, LOST, LastWords
from bnncli.machine.messages import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = datetime.timedelta(minutes=30)  # that workers wait for each other
LONG_PATIENCE = datetime.timedelta(days=30)  # of a crew, while the first reads the data: heartbeats tell that it lives


@dataclass(frozen=True)
class Team:
    """The processes of one command.

    Args:
        rank: of this one, from 0 on.
        size: how many they are.
        num_shards: into how many parts the examples are split, whatever the size: the sums of these are added in a fixed order.
        is_in_step: whether all run the command; of a crew the first does, and the others do what it asks.
    """

    rank: int
    size: int
    num_shards: int = 64
    is_in_step: bool = True

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

    def broadcast(self, tensor: Tensor, *, owner: int) -> Tensor:
        """What one process, the owner, has; the others give a tensor of that shape and type, which is overwritten."""
        if self.size > 1:
            with _speaking():
                torch.distributed.broadcast(tensor, src=owner)
            _sent[0] += tensor.numel() * tensor.element_size() * (self.size - 1) * (owner == self.rank)
        return tensor

    def gather_named(self, named: Mapping[str, Tensor], *, to_all: bool = True) -> list[dict[str, Tensor]]:
        """The tensors that each process names, of any shapes, on the CPU, in the order of ranks.

        Args:
            to_all: whether all are given them; else the first alone is, and the others get an empty list.
        """
        import numpy as np  # here: signals are handled before it is there
        from safetensors.torch import load, save

        own = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        if self.size == 1:
            return [own]
        content = save({name: tensor.clone() for name, tensor in own.items()})  # it takes none that share memory
        lengths = [int(length) for length in self.gather(torch.tensor(len(content)))]
        packed = torch.zeros(max(lengths), dtype=torch.uint8)
        packed.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        found = self.gather(packed) if to_all else self._gather_to_leader(packed)
        return [load(part[:length].numpy().tobytes()) for part, length in zip(found, lengths, strict=False)]

    def _gather_to_leader(self, tensor: Tensor) -> list[Tensor]:
        """What `gather` gives, on the first process; nothing on the others."""
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_leader else []
        with _speaking():
            torch.distributed.gather(tensor, found or None, dst=0)
        _sent[0] += 0 if self.is_leader else tensor.numel() * tensor.element_size()
        return found

    def told_by_leader(self, value: Any) -> Any:
        """What the first process has as `value`."""
        return self.told_by(0, value)

    def told_by(self, rank: int, value: Any) -> Any:
        """What the process of that rank has as `value`."""
        if self.size == 1:
            return value
        box = [value]
        with _speaking():
            torch.distributed.broadcast_object_list(box, src=rank)
        return box[0]

    def send(self, value: Any, to: int) -> Sending:
        """Hand a value to another process, which takes it by `receive`; tensors in it arrive on the CPU."""
        packed = pack(value)
        parts = (torch.tensor([len(packed)]), packed)
        with _speaking():
            sending = Sending(parts, [torch.distributed.isend(part, to) for part in parts])
        _sent[0] += len(packed)
        return sending

    def receive(self, of: int) -> Any:
        """The value that another process has sent here first, of those that were not received."""
        size = torch.zeros(1, dtype=torch.int64)
        with _speaking():
            torch.distributed.recv(size, of)
            packed = torch.empty(int(size), dtype=torch.uint8)
            torch.distributed.recv(packed, of)
        _received[0] += len(packed)
        return unpack(packed)


class Sending(NamedTuple):
    """A value on its way: its bytes stay as long as the other has not asked for them."""

    parts: tuple[Tensor, ...]
    works: list[Any]

    def wait(self) -> None:
        """Until the other has it. Raises what has ended the other."""
        with _speaking():
            for work in self.works:
                work.wait()


_team: list[Team] = []
_alone = [False]
_beats: list[Heartbeats] = []
STOPS: list[int] = []  # signals that asked this process to stop (signals.py), which its marks of life tell the first
_words: list[LastWords] = []
_sent, _received = [0], [0]


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
        patience = PATIENCE if team.is_in_step else LONG_PATIENCE
        with _speaking():
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=PATIENCE))
            torch.distributed.init_process_group(
                backend, store=store, rank=team.rank, world_size=team.size, timeout=patience
            )
        _words[:] = [LastWords(store, team.rank, team.size)]
        _beats[:] = [Heartbeats(store, team.rank, team.size, leave_at_once, STOPS)]
        _beats[0].start()
    _team[:] = [team]


def meet() -> None:
    """Wait until all have come here. Raises what has ended one of them."""
    if _team:
        _team[0].gather(torch.zeros(1))


def part(error: BnnError | None = None) -> None:
    """Speak with the others no more: whoever still waits for this process is told that it is gone, and what has ended it."""
    if _team and _team[0].size > 1:
        if error is not None and (_team[0].is_leader or error.code != LOST):
            _words[0].leave(error)
        torch.distributed.destroy_process_group()
        if error is not None and _team[0].is_leader:
            _words[0].wait_until_heard()


def first_has_ended() -> bool:
    """Whether the first process has parted in an error, or is gone."""
    return not _words or _words[0].first_has_ended()


def heard() -> BnnError | None:
    """What has ended another process, if that is known; see LastWords."""
    return _words[0].heard() if _words else None


def killed(*, patience: float = 0.0) -> DeviceError | None:
    """The error for a process that is no more, if one is known to be; see LastWords."""
    return _words[0].killed(patience=patience) if _words else None


def leave() -> None:
    """This process is of no team any more."""
    if _team and _team.pop().size > 1:
        _beats.pop().stop()
        _words.pop()


def team() -> Team | None:
    """Those that work in step with this process; None where it works alone."""
    return _team[0] if _team and _team[0].is_in_step and not _alone[0] else None


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process shares out nothing: what it works on is its share already."""
    _alone[0], before = True, _alone[0]
    try:
        yield
    finally:
        _alone[0] = before


def crew() -> Team | None:
    """Those of whom the first runs the command and asks the others; None where it works alone, or all are in step."""
    return _team[0] if _team and not _team[0].is_in_step else None


def is_leader() -> bool:
    """Whether this process writes: it is alone, or the first."""
    return not _team or _team[0].is_leader


def bytes_sent() -> int:
    """What this process has sent so far of tensors and of messages."""
    return _sent[0]


def bytes_received() -> int:
    """What this process has received so far of messages."""
    return _received[0]


class _speaking:
    """A conversation with the others, whose end is an error of ours: what has ended one of them, if that is known."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):  # of torch.distributed, all of them
            raise _lost() from error


def _lost() -> BnnError:
    """Why a conversation has ended: what another process has told, else which is no more, else that one is."""
    if (told := heard()) is not None:
        return told
    mine = _team[0].rank if _team else os.environ.get("RANK")
    lost = DeviceError(f"worker {mine} lost contact with the other workers: one of them has stopped", code=LOST)
    return killed(patience=ENDING) or lost
