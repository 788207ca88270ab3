"""What ends one process of several, told to the others: they lose it in the midst of a conversation, and look here why.

A word lies in the store that torchrun keeps, as marks of life do (heartbeats.py), or the first process itself where others start it
(srun, say): before that one ends, it gives the others time to look. The first process says what has ended
another one; that one says nothing, and the others end with the exit code of the first. One that was killed leaves no word: on the
same machine it is known by its process.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncli.errors import BnnError, DeviceError

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
