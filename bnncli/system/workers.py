"""Share one command's work between the processes that torchrun starts.

Collectives, messages of any picklable value, heartbeats that find a hung worker, and the propagation of one worker's
error to the others.
"""

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
    """Pickle a value into bytes (n,) uint8."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """Unpickle a packed value; tensors are on the CPU."""
    return pickle.loads(packed.numpy().data)


class _Pickler(pickle.Pickler):
    """Pickle only the values that a tensor shows, not all of the memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented


EVERY = 3.0  # seconds between heartbeats
SILENCE = 40.0  # seconds without a heartbeat, after which a process is taken for lost


@dataclass
class Heartbeats:
    """Send this process's heartbeats and watch those of others: the leader all, the others the leader.

    Args:
        store: with `set` and `get` of bytes, shared by all.
        rank, size: which of how many processes this is.
        end: called with the rank of a silent one.
        stops: signals that asked this process to stop; the leader's list also gets the others' signals.
    """

    store: Any
    rank: int
    size: int
    end: Callable[[int], None]
    stops: list[int] = field(default_factory=list)
    _seen: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Send the first heartbeat, and go on from a thread."""
        self.store.set(f"beat/{self.rank}", "0")
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Stop sending and watching."""
        self._stopped.set()

    def silent(self, now: float) -> int | None:
        """Return the rank of a watched process whose heartbeats have stopped; None where all live."""
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


LOST = "worker_lost"  # the code of an error that says only that others have ended
ENDING = 1.0  # seconds between the closing of a killed process's connections and its end


@dataclass
class ErrorBoard:
    """Errors that processes leave for the others before they end.

    Args:
        store: with `set`, `get` and `check`, shared by all.
        rank, size: which of how many processes this is.
    """

    store: Any
    rank: int
    size: int
    _of_first: BnnError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Publish this process's machine and process number."""
        self.store.set(_process_key(self.rank), f"{_machine()}/{os.getpid()}")

    def leave(self, error: BnnError) -> None:
        """Publish the error that ends this process."""
        word = str(int(error.exit)).encode() if self.rank == 0 else pickle.dumps(error)
        with suppress(RuntimeError):  # the store is gone, and with it whoever started this process
            self.store.set(_key(self.rank), word)
            self.store.get(_key(self.rank))  # wait until it has arrived

    def heard(self) -> BnnError | None:
        """Return the error of another process, None where there is none: for the leader that of the lowest rank, for the others the leader's."""
        ranks = range(1, self.size) if self.rank == 0 else range(1)
        with suppress(RuntimeError):
            for rank in ranks:
                if self.store.check([_key(rank)]):
                    return self._told(rank, bytes(self.store.get(_key(rank))))
        return self._of_first  # the store may be gone by now

    def wait_until_heard(self) -> None:
        """On the leader, wait until every other process has read its error, ended or left an error itself; at most ENDING seconds."""
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
        """Return the error for the process of lowest rank on this machine that has ended; None where none is known.

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
        """Return whether the leader has left an error, or is gone with the store."""
        try:
            return self._of_first is not None or (bool(self.store.check([_key(0)])) and self.heard() is not None)
        except RuntimeError:
            return True

    def _processes_here(self) -> dict[int, str]:
        """Return the process numbers on this machine, by rank; none where the store is gone."""
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                if self.store.check([_process_key(rank)]):  # `get` would wait for a missing key
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
        return name_worker(rank, error)


def name_worker(rank: int, error: BnnError) -> BnnError:
    """Add the number of the worker to its error."""
    error.message = f"worker {rank}: {error.message}"
    return error


def _key(rank: int) -> str:
    return f"last word/{rank}"


def _heard_key(rank: int) -> str:
    return f"last word/heard by {rank}"


def _process_key(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str:
    """Name this machine, or the container with its own process numbers."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _is_running(pid: str) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


PATIENCE = datetime.timedelta(minutes=30)  # how long workers wait for each other
LONG_PATIENCE = datetime.timedelta(days=30)  # of a pool, while the leader reads the data: heartbeats show that it lives


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
        _sent[0] += tensor.numel() * tensor.element_size() * (self.size - 1)
        return found

    def broadcast(self, tensor: Tensor, *, owner: int) -> Tensor:
        """Return the owner's tensor; the others pass one of that shape and type, which is overwritten."""
        if self.size > 1:
            with _speaking():
                torch.distributed.broadcast(tensor, src=owner)
            _sent[0] += tensor.numel() * tensor.element_size() * (self.size - 1) * (owner == self.rank)
        return tensor

    def gather_named(self, named: Mapping[str, Tensor], *, to_all: bool = True) -> list[dict[str, Tensor]]:
        """Return the tensors that each process names, of any shapes, on the CPU, in the order of ranks.

        Args:
            to_all: whether every process gets them; else only the leader, and the others get an empty list.
        """
        from safetensors.torch import load, save

        own = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        if self.size == 1:
            return [own]
        # safetensors refuses tensors that share memory
        content = save({name: tensor.clone() for name, tensor in own.items()})
        lengths = [int(length) for length in self.gather(torch.tensor(len(content)))]
        packed = torch.zeros(max(lengths), dtype=torch.uint8)
        packed.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        found = self.gather(packed) if to_all else self._gather_to_leader(packed)
        return [load(part[:length].numpy().tobytes()) for part, length in zip(found, lengths, strict=False)]

    def _gather_to_leader(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes on the leader, nothing on the others."""
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_leader else []
        with _speaking():
            torch.distributed.gather(tensor, found or None, dst=0)
        _sent[0] += 0 if self.is_leader else tensor.numel() * tensor.element_size()
        return found

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

    def send(self, value: Any, to: int) -> Sending:
        """Send a value to another process, which takes it by `receive`; tensors in it arrive on the CPU."""
        packed = pack(value)
        parts = (torch.tensor([len(packed)]), packed)
        with _speaking():
            sending = Sending(parts, [torch.distributed.isend(part, to) for part in parts])
        _sent[0] += len(packed)
        return sending

    def receive(self, of: int) -> Any:
        """Return the first value sent by another process that has not been received yet."""
        size = torch.zeros(1, dtype=torch.int64)
        with _speaking():
            torch.distributed.recv(size, of)
            packed = torch.empty(int(size), dtype=torch.uint8)
            torch.distributed.recv(packed, of)
        _received[0] += len(packed)
        return unpack(packed)


class Sending(NamedTuple):
    """A value being sent; it keeps the bytes alive until the other process has received them."""

    parts: tuple[Tensor, ...]
    works: list[Any]

    def wait(self) -> None:
        """Wait until the other process has it. Raises what has ended the other."""
        with _speaking():
            for work in self.works:
                work.wait()


_team: list[Team] = []
_alone = [False]
_beats: list[Heartbeats] = []
STOPS: list[int] = []  # signals that asked this process to stop (signals.py), passed to the leader by heartbeats
_words: list[ErrorBoard] = []
_sent, _received = [0], [0]


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
        _words[:] = [ErrorBoard(store, team.rank, team.size)]
        _beats[:] = [Heartbeats(store, team.rank, team.size, leave_at_once, STOPS)]
        _beats[0].start()
    _team[:] = [team]


def synchronise() -> None:
    """Wait for all processes. Raises what has ended one of them."""
    if _team:
        _team[0].gather(torch.zeros(1))


def disconnect(error: BnnError | None = None) -> None:
    """Disconnect: whoever still waits for this process learns that it is gone, and which error ended it."""
    if _team and _team[0].size > 1:
        if error is not None and (_team[0].is_leader or error.code != LOST):
            _words[0].leave(error)
        torch.distributed.destroy_process_group()
        if error is not None and _team[0].is_leader:
            _words[0].wait_until_heard()


def leader_has_ended() -> bool:
    """Return whether the leader has ended with an error, or is gone."""
    return not _words or _words[0].first_has_ended()


def error_of_others() -> BnnError | None:
    """Return the error of another process, if known; see LastWords."""
    return _words[0].heard() if _words else None


def find_killed_worker(*, patience: float = 0.0) -> DeviceError | None:
    """Return the error for a process that has ended, if known; see LastWords."""
    return _words[0].killed(patience=patience) if _words else None


def leave_team() -> None:
    """Leave the team."""
    if _team and _team.pop().size > 1:
        _beats.pop().stop()
        _words.pop()


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


def bytes_sent() -> int:
    """Return the bytes of tensors and messages that this process has sent."""
    return _sent[0]


def bytes_received() -> int:
    """Return the bytes of messages that this process has received."""
    return _received[0]


class _speaking:
    """Turn torch.distributed's errors inside the block into ours: what has ended another process, if known."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):  # all errors of torch.distributed are
            raise _lost() from error


def _lost() -> BnnError:
    """Return why a conversation has ended: the error another process left, else which one has ended, else that one has."""
    if (told := error_of_others()) is not None:
        return told
    mine = _team[0].rank if _team else os.environ.get("RANK")
    lost = DeviceError(f"worker {mine} lost contact with the other workers: one of them has stopped", code=LOST)
    return find_killed_worker(patience=ENDING) or lost


Kind = TypeVar("Kind", bound="np.generic")


def gather_at_leader(own: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]] | None:
    """Gather the parts of all processes on the leader, in the order of ranks; None on the others.

    Args:
        own: the parts of this process, perhaps none; tensors of the CPU by name.
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

    def of_all(self, found: NDArray[Kind], sizes: Sequence[int]) -> NDArray[Kind]:
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
        parts: dict[int, NDArray[Kind]] = {}
        for own, given in zip(held, others.gather(torch.from_numpy(packed)), strict=True):
            ends = np.cumsum([sizes[part] for part in own])
            parts |= zip(own, np.split(given.numpy(), ends)[:-1], strict=True)
        return np.concatenate([parts[part] for part in range(self.count)])

    @property
    def _others(self) -> Team | None:
        """Return the team that shares the work; None where this process does all of it."""
        others = team()
        return None if others is None or others.size == 1 or self.count < others.size else others
