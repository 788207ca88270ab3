"""Which files one command has checked already: a command opens the same artifact many times, and a check is not cheap.

A file is known by what the kernel says of it: device, inode, size, times of change. The time of change of the inode
cannot be set by a program, but it moves in steps; so a file that changed just before it was looked at is not
remembered (as git does with its index), nor one on a file system that counts in whole seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

STEP_NS = 50_000_000  # five times the slowest clock of Linux file systems that count in nanoseconds
_SECOND_NS = 1_000_000_000

State = tuple[int, ...]
_CHECKED: ContextVar[set[State] | None] = ContextVar("checked", default=None)


@contextmanager
def checks_remembered() -> Iterator[None]:
    """Within, a file that was checked and has not changed since need not be checked again; without, nothing is kept."""
    token = _CHECKED.set(set())
    try:
        yield
    finally:
        _CHECKED.reset(token)


def state_of(found: os.stat_result) -> State:
    """What changes when a file is changed or replaced."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_checked(state: State) -> bool:
    """Whether this command has checked the file in this state."""
    known = _CHECKED.get()
    return known is not None and state in known


def is_settled(state: State) -> bool:
    """Whether every change from now on shows in the state."""
    changed = state[-1]
    return bool(changed % _SECOND_NS) and time.time_ns() - changed > STEP_NS


def remember(state: State) -> None:
    """Take note that the file was checked; its state was settled before the check began."""
    known = _CHECKED.get()
    if known is not None:
        known.add(state)
