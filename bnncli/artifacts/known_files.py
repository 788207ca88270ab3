"""Remember within one command which files were checked: it opens the same artifact many times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

STEP_NS = 50_000_000  # five times the slowest clock of Linux file systems that count in nanoseconds
_SECOND_NS = 1_000_000_000
State = tuple[int, ...]


@dataclass(frozen=True)
class _CheckedFiles:
    """States of files that were checked, and headers by state."""

    checked: set[State] = field(default_factory=set)
    headers: dict[State, Any] = field(default_factory=dict)


_CHECKED_FILES: ContextVar[_CheckedFiles | None] = ContextVar("known", default=None)


@contextmanager
def remember_checks() -> Iterator[None]:
    """Within, a file that was checked and has not changed since need not be checked again; without, nothing is kept."""
    token = _CHECKED_FILES.set(_CheckedFiles())
    try:
        yield
    finally:
        _CHECKED_FILES.reset(token)


def state_of(found: os.stat_result) -> State:
    """Return a value that changes when the file is changed or replaced."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_checked(state: State) -> bool:
    """Return whether this command has checked the file in this state."""
    known = _CHECKED_FILES.get()
    return known is not None and state in known.checked


def is_settled(state: State) -> bool:
    """Return whether every change from now on shows in the state."""
    changed = state[-1]
    return bool(changed % _SECOND_NS) and time.time_ns() - changed > STEP_NS


def remember(state: State) -> None:
    """Take note that the file was checked; its state was settled before the check began."""
    known = _CHECKED_FILES.get()
    if known is not None:
        known.checked.add(state)


def recall_header(state: State) -> Any:
    """The header that was read from the file in this state; None where this command has read none."""
    known = _CHECKED_FILES.get()
    return None if known is None else known.headers.get(state)


def remember_header(state: State, header: Any) -> None:
    """Keep a header; the file's state was settled before it was read, and is the same after."""
    known = _CHECKED_FILES.get()
    if known is not None:
        known.headers[state] = header
