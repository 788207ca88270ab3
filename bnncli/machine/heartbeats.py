"""Signs of life between the processes of one command: where one is silent, the others end and say which.

Whoever waits for another in a sum cannot tell a slow one from one that hangs. A thread of each leaves a mark in the store that
torchrun keeps, the first process looks at all of them, the others at the first one's. A signal that asked one of the others to stop
stands in its mark: the first, which alone stops where the work allows it, is asked as well.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bnncli.errors import Exit

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
