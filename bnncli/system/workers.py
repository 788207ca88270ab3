"""Share one command's work between the processes that torchrun starts.

The collectives are torch.distributed's; a connection that is lost, or not answered in time, ends all workers. The first
error of a worker is left in the store of torch.distributed, where the leader finds and reports it.
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bnncli.errors import BnnError, DeviceError, Exit
from bnncli.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Kind = TypeVar("Kind")
Number = TypeVar("Number", bound="np.generic")


LOST = "worker_lost"  # the code of an error that says only that others have ended
# Keys of the store: the first error of a worker with its rank, and the exit code of the leader.
_ERROR, _OVER = "error", "over"
_ARRIVING = datetime.timedelta(seconds=1)  # for which a lost connection's error is waited


def name_worker(rank: int, error: BnnError) -> BnnError:
    """Add the number of the worker to its error."""
    error.message = f"worker {rank}: {error.message}"
    return error


PATIENCE = datetime.timedelta(minutes=30)  # how long workers wait for each other
LONG_PATIENCE = datetime.timedelta(days=1)  # of a pool, while the leader reads the data


@dataclass(frozen=True)
class Team:
    """The processes of one command.

    Args:
        rank: of this one, from 0 on.
        size: number of processes.
        num_shards: number of parts of the examples, whatever the size: their sums are added in a fixed order.
        is_in_step: whether all run the command; in a pool only the leader does, and the others do what it asks.
    """

    rank: int
    size: int
    num_shards: int = 64
    is_in_step: bool = True

    @property
    def is_leader(self) -> bool:
        """Return whether this process writes files and messages."""
        return self.rank == 0

    @property
    def num_here(self) -> int:
        """Return how many of the processes are on this machine."""
        return min(self.size, max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.size))))

    def share(self, count: int) -> range:
        """Return which of `count` parts are this process's."""
        return shares(count, self.size)[self.rank]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape and type, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _speaking():
            torch.distributed.all_gather(found, tensor.contiguous())
        return found

    def broadcast(self, tensor: Tensor, *, owner: int) -> Tensor:
        """Return the owner's tensor; the others pass one of that shape and type, which is overwritten."""
        if self.size > 1:
            with _speaking():
                torch.distributed.broadcast(tensor, src=owner)
        return tensor

    def gather_named(self, named: Mapping[str, Tensor], *, to_all: bool = True) -> list[dict[str, Tensor]]:
        """Return the tensors that each process names, of any shapes, on the CPU, in the order of ranks.

        Args:
            to_all: whether every process gets them; else only the leader, and the others get an empty list.
        """
        # A view would be sent with all that it is a view of.
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
        return self.gather_objects(own, to_all=to_all)

    def gather_objects(self, value: Kind, *, to_all: bool = True) -> list[Kind]:
        """Return the values of all processes, in the order of ranks; without `to_all` only on the leader, else empty."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _speaking():
            if to_all:
                torch.distributed.all_gather_object(found, value)
                return found
            torch.distributed.gather_object(value, found if self.is_leader else None, dst=0)
        return found if self.is_leader else []

    def told_by_leader(self, value: Any) -> Any:
        """Return the leader's `value`."""
        return self.told_by(0, value)

    def told_by(self, rank: int, value: Any) -> Any:
        """Return the `value` of the process of that rank."""
        if self.size == 1:
            return value
        box = [value]
        with _speaking():
            torch.distributed.broadcast_object_list(box, src=rank)
        return box[0]

    def send(self, value: Any, to: int) -> None:
        """Send a value to another process, which takes it by `receive`. Raises what has ended the other."""
        with _speaking():
            torch.distributed.send_object_list([value], to)

    def receive(self, of: int) -> Any:
        """Return the first value sent by another process that has not been received yet."""
        box = [None]
        with _speaking():
            torch.distributed.recv_object_list(box, of)
        return box[0]


_team: list[Team] = []
_alone = [False]
_stores: list[Any] = []  # torch's store of all processes, while they are connected


def shares(count: int, size: int) -> list[range]:
    """Split `count` parts into consecutive ranges, one a process, as even as possible."""
    return [range(rank * count // size, (rank + 1) * count // size) for rank in range(size)]


def rank_and_size() -> tuple[int, int] | None:
    """Return the rank and size that torchrun set; None where it did not start this process."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if "MASTER_ADDR" in os.environ and 0 <= rank < size else None


def connect(team: Team, device: torch.device) -> None:
    """Connect to the other processes, if any. Raises DeviceError where they do not come."""
    if team.size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = PATIENCE if team.is_in_step else LONG_PATIENCE
        with _speaking():
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=PATIENCE))
            torch.distributed.init_process_group(
                backend, store=store, rank=team.rank, world_size=team.size, timeout=patience
            )
        _stores[:] = [store]
    _team[:] = [team]


def synchronise() -> None:
    """Wait for all processes. Raises what has ended one of them."""
    if _team:
        _team[0].gather(torch.zeros(1))


def disconnect(error: BnnError | None = None) -> None:
    """Disconnect: whoever still waits for this process learns that it is gone, and which error ended it."""
    if not _team or _team[0].size == 1:
        return
    if error is not None:
        with suppress(RuntimeError):  # the store is gone, and with it whoever started this process
            if error.code != LOST:
                _stores[0].compare_set(_ERROR, "", pickle.dumps((_team[0].rank, error)).hex())
            if _team[0].is_leader:
                _stores[0].set(_OVER, str(int(error.exit)))
    torch.distributed.destroy_process_group()


def leader_exit() -> int | None:
    """Return the exit code of a leader that has ended with an error; 69 where it is gone, None while it runs."""
    try:
        return int(_stores[0].get(_OVER)) if _stores[0].check([_OVER]) else None
    except RuntimeError:
        return int(Exit.DEVICE)


def leave_team() -> None:
    """Leave the team."""
    if _team and _team.pop().size > 1:
        _stores.clear()


def team() -> Team | None:
    """Return the processes that work in step with this one; None where it works alone."""
    return _team[0] if _team and _team[0].is_in_step and not _alone[0] else None


@contextmanager
def working_alone() -> Iterator[None]:
    """Work alone inside the block, on this process's own share."""
    _alone[0], before = True, _alone[0]
    try:
        yield
    finally:
        _alone[0] = before


def worker_pool() -> Team | None:
    """Return the processes of a pool, whose leader runs the command and asks the others; None where there is none."""
    return _team[0] if _team and not _team[0].is_in_step else None


def is_leader() -> bool:
    """Return whether this process writes: it is alone, or the leader."""
    return not _team or _team[0].is_leader


class _speaking:
    """Turn torch.distributed's errors inside the block into ours: what has ended another process, if known."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):  # all errors of torch.distributed are
            raise _lost() from error


def _lost() -> BnnError:
    """Return why a conversation has ended: the error that another process left, else that one has stopped."""
    with suppress(RuntimeError):  # none comes, or the store is gone
        _stores[0].wait([_ERROR], _ARRIVING)
        rank, error = pickle.loads(bytes.fromhex(_stores[0].get(_ERROR).decode()))
        return name_worker(rank, error)
    what = "a worker stopped without an error message (it may have been killed): stopping all workers"
    return DeviceError(what, code=LOST)


def gather_at_leader(own: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]] | None:
    """Gather the parts of all processes on the leader, in the order of ranks; None on the others.

    Args:
        own: the parts of this process, perhaps none; tensors of the CPU by name.
    """
    others = team()
    if others is None or others.size == 1:
        return list(own)
    found = others.gather_objects(list(own), to_all=False)
    return [part for parts in found for part in parts] if others.is_leader else None


@dataclass(frozen=True)
class Parts:
    """Parts of work whose results every process needs; shared out, or all done by each process where there are too few.

    Args:
        count: number of parts.
    """

    count: int

    @property
    def own(self) -> range:
        """Return the numbers of this process's parts, interleaved so that the early ones, which may take longer, are spread evenly."""
        if (others := self._others) is None:
            return range(self.count)
        return range(others.rank, self.count, others.size)

    def of_all(self, found: NDArray[Number], sizes: Sequence[int]) -> NDArray[Number]:
        """Return the results of all parts, (sum of sizes, ...), in order.

        Args:
            found: (sum of own sizes, ...), this process's results, concatenated.
            sizes: of each part, perhaps 0.
        """
        if (others := self._others) is None:
            return found
        held = [range(rank, self.count, others.size) for rank in range(others.size)]
        most = max(sum(sizes[part] for part in own) for own in held)
        packed = np.zeros((most, *found.shape[1:]), dtype=found.dtype)
        packed[: len(found)] = found
        parts: dict[int, NDArray[Number]] = {}
        for own, given in zip(held, others.gather(torch.from_numpy(packed)), strict=True):
            ends = np.cumsum([sizes[part] for part in own])
            parts |= zip(own, np.split(given.numpy(), ends)[:-1], strict=True)
        return np.concatenate([parts[part] for part in range(self.count)])

    @property
    def _others(self) -> Team | None:
        """Return the team that shares the work; None where this process does all of it."""
        others = team()
        return None if others is None or others.size == 1 or self.count < others.size else others
