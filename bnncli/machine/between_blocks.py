"""What is done between two blocks of work: a signal stops it, and the heap's holes go back to the system."""

from __future__ import annotations

from bnncli.machine import signals
from bnncli.machine.memory import give_back_freed, resident_bytes

MOST_HOLES = 2**25  # bytes that a process grows by before holes are looked for
# What grows again within so few blocks is no hole but what each block takes anew: giving it back took a fifth of a ResNet-20's time.
FEW_BLOCKS = 8


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
        allowed: bytes above it that are left alone.
        num_blocks: since holes were last looked for.
    """

    def __init__(self) -> None:
        self.level = 0
        self.allowed = MOST_HOLES
        self.num_blocks = 0

    def give_back_holes(self) -> None:
        """Where the process has grown by more than is allowed: twice as much from then on where it did so within a few blocks."""
        size = resident_bytes()
        self.num_blocks += 1
        if size > self.level + self.allowed:
            if self.level:
                give_back_freed()
            left = resident_bytes()
            if self.num_blocks < FEW_BLOCKS and size - left > MOST_HOLES // 2:
                self.allowed *= 2
            self.level, self.num_blocks = left, 0
            size = left
        self.level = min(self.level, size)


_heap = _Heap()
