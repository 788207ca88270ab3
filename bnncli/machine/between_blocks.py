"""What is done between two blocks of work: a signal stops it, and the heap's holes go back to the system."""

from __future__ import annotations

from bnncli.machine import signals
from bnncli.machine.memory import give_back_freed, resident_bytes

MOST_HOLES = 2**25  # bytes that a process grows by before holes are looked for


def between_blocks(where: str) -> None:
    """To be called where little is held. Raises Interrupted when a signal has come; `where` says how far the work was."""
    signals.raise_if_interrupted(where)
    _heap.give_back_holes()


class _Heap:
    """The C library's, of this process.

    A block that is freed has no room for the next of its size where that is to be aligned (glibc before 2.38): each then lies behind
    the last, and a tanh network's predictions, of 1.6 MB an example, held up to 430 MiB in place of 50, one run in three.

    Args:
        level: bytes that the process had when holes were last looked for, or fewer since.
    """

    def __init__(self) -> None:
        self.level = 0

    def give_back_holes(self) -> None:
        """Where the process has grown by MOST_HOLES; once for growth that is in use."""
        size = resident_bytes()
        if size > self.level + MOST_HOLES:
            if self.level:
                give_back_freed()
            size = resident_bytes()
            self.level = size
        self.level = min(self.level, size)


_heap = _Heap()
