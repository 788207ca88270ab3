"""Share one command's work between the processes that torchrun starts.

Collectives, messages of any picklable value, heartbeats that find a hung worker, and the propagation of one worker's error to
the others."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bnncli.errors import BnnError, DeviceError, Exit
from bnncli.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def pack(value: Any) -> Tensor:
    """A value as bytes (n,) uint8."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """The value that was packed; tensors are on the CPU."""
    return pickle.loads(packed.numpy().data)


class _Pickler(pickle.Pickler):
    """Takes of a tensor the values that it shows, not all that lies in the memory that it is a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented


EVERY = 3.0  # seconds between marks
SILENCE = 40.0  # seconds without a new one, after which a process is taken for lost


@dataclass
class Heartbeats:
    """This process's marks, and those that it looks at.

    Args:
        store: with `set` and `get` of bytes, common to all.
        rank, size: which of how many processes this is.
        end: called with the rank of a silent one.
        stops: the signals that asked this process to stop; of the first one, gains what the others have received.
    """

    store: Any
    rank: int
    size: int
    end: Callable[[int], None]
    stops: list[int] = field(default_factory=list)
    _seen: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Leave the first mark, and go on from a thread."""
        self.store.set(f"beat/{self.rank}", "0")
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """No more marks, and nobody is looked at."""
        self._stopped.set()

    def silent(self, now: float) -> int | None:
        """A process that has left no new mark for too long, of those that this one looks at; None where all live."""
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            mark = bytes(self.store.get(f"beat/{rank}"))
            if self.rank == 0 and not self.stops and (signum := mark.partition(b" ")[2]):
                self.stops.append(int(signum))
            known = self._seen.get(rank)
            if known is None or known[0] != mark:
                self._seen[rank] = (mark, now)
            elif now - known[1] > SILENCE:
                return rank
        return None

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(EVERY):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", " ".join(map(str, (count, *self.stops[:1]))))
                lost = self.silent(time.monotonic())
            except Exception:  # the store is gone, and with it whoever started this process
                return
            if lost is not None and not self._stopped.is_set():
                self.end(lost)


def leave_at_once(rank: int) -> None:
    """End this process, which may be waiting for the silent one in a call that cannot be stopped."""
    text = f"error: worker {rank} has not responded for {SILENCE:.0f} seconds: stopping all workers"
    print(text, file=sys.stderr, flush=True)
    os._exit(Exit.DEVICE)


LOST = "worker_lost"  # the code of an error that says no more than that others have ended
ENDING = 1.0  # seconds that a killed process may take to end after its connections have


@dataclass
class LastWords:
    """Where processes leave and look for them.

    Args:
        store: with `set`, `get` and `check`, common to all.
        rank, size: which of how many processes this is.
    """

    store: Any
    rank: int
    size: int
    _of_first: BnnError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Say which process this is."""
        self.store.set(_process_key(self.rank), f"{_machine()}/{os.getpid()}")

    def leave(self, error: BnnError) -> None:
        """Tell what ends this process, before it is lost to the others."""
        word = str(int(error.exit)).encode() if self.rank == 0 else pickle.dumps(error)
        with suppress(RuntimeError):  # the store is gone, and with it whoever started this process
            self.store.set(_key(self.rank), word)
            self.store.get(_key(self.rank))  # it has arrived

    def heard(self) -> BnnError | None:
        """What has ended another process: for the first that of the lowest rank that said it, for others that of the first; None where none did."""
        ranks = range(1, self.size) if self.rank == 0 else range(1)
        with suppress(RuntimeError):
            for rank in ranks:
                if self.store.check([_key(rank)]):
                    return self._told(rank, bytes(self.store.get(_key(rank))))
        return self._of_first  # heard before, where the store is gone by now

    def wait_until_heard(self) -> None:
        """Of the first process: until the others have heard its word, have ended, or say what has ended themselves; for ENDING seconds."""
        deadline, here = time.monotonic() + ENDING, self._processes_here()
        waiting = set(range(1, self.size))
        with suppress(RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting -= {rank for rank, pid in here.items() if not _is_running(pid)}
                waiting -= {
                    rank for rank in waiting if self.store.check([_heard_key(rank)]) or self.store.check([_key(rank)])
                }
                time.sleep(0.01)

    def killed(self, *, patience: float = 0.0) -> DeviceError | None:
        """The error for the process of the lowest rank that is no more, of those on this machine; None where none is known to be.

        Args:
            patience: seconds to wait for one that is about to end.
        """
        deadline, here = time.monotonic() + patience, self._processes_here()
        while True:
            for rank, pid in here.items():
                if not _is_running(pid):
                    what = (
                        f"worker {rank} stopped without an error message (it may have been killed): stopping all "
                        "workers"
                    )
                    return DeviceError(what, code=LOST)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def first_has_ended(self) -> bool:
        """Whether the first process has left a word, or is gone with the store."""
        try:
            return self._of_first is not None or (bool(self.store.check([_key(0)])) and self.heard() is not None)
        except RuntimeError:
            return True

    def _processes_here(self) -> dict[int, str]:
        """The numbers of the processes on this machine, by rank; none where the store is gone."""
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                if self.store.check([_process_key(rank)]):  # else `get` would wait for it
                    machine, _, pid = bytes(self.store.get(_process_key(rank))).decode().rpartition("/")
                    found |= {rank: pid} if machine == _machine() else {}
        return found

    def _told(self, rank: int, word: bytes) -> BnnError:
        if rank == 0:
            error: BnnError = DeviceError("worker 0 has stopped", code=LOST)
            error.exit = int(word)
            self._of_first = error
            self.store.set(_heard_key(self.rank), "heard")
            return error
        error = pickle.loads(word)
        return of_worker(rank, error)


def of_worker(rank: int, error: BnnError) -> BnnError:
    """The error of a worker, with its number."""
    error.message = f"worker {rank}: {error.message}"
    return error


def _key(rank: int) -> str:
    return f"last word/{rank}"


def _heard_key(rank: int) -> str:
    return f"last word/heard by {rank}"


def _process_key(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str:
    """This machine, or the part of it in which process numbers mean the same."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _is_running(pid: str) -> bool:
    """Whether a process has not ended; one that has, and of which its parent does not know yet, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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


Kind = TypeVar("Kind", bound="np.generic")


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
