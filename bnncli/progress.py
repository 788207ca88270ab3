"""Progress of long loops, independent of the terminal.

Every long loop opens a task and calls `advance` once per step. The command line passes an implementation that draws a
bar or writes log lines, and that raises `Interrupted` after a signal, so that every such loop can be stopped.
"""

from __future__ import annotations

import warnings
from typing import Protocol


class Task(Protocol):
    """One running loop."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Report `amount` units done, or 0 to check for signals, and a note. Raises Interrupted after a signal."""


class Progress(Protocol):
    """Receiver of progress reports."""

    def task(self, name: str, total: int) -> Task:
        """Open a task called `name` of `total` units; 0 means unknown."""

    def warn(self, text: str) -> None:
        """Warn the user without ending the loop; repeated texts count once."""


class _SilentTask:
    def advance(self, amount: int = 1, note: str = "") -> None:
        return None


class SilentProgress:
    """Reports nothing; the default outside the command line."""

    def task(self, name: str, total: int) -> Task:
        """Return a task that reports nothing."""
        return _SilentTask()

    def warn(self, text: str) -> None:
        """Issue a Python warning."""
        warnings.warn(text, RuntimeWarning, stacklevel=2)


SILENT = SilentProgress()
