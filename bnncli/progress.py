"""How long loops report how far they are, without knowing what a terminal is.

Every long loop opens a task and calls `advance` once a step. The command line passes an implementation that
draws a bar, or writes log lines, and that raises `Interrupted` after a signal: a loop that advances can be stopped.
"""

from __future__ import annotations

import warnings
from typing import Protocol


class Task(Protocol):
    """One running loop."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Report `amount` more units done, 0 to be stopped in the midst of one; `note` is shown beside the bar. Raises Interrupted after a signal."""


class Progress(Protocol):
    """Where loops report."""

    def task(self, name: str, total: int) -> Task:
        """A task called `name` that will advance `total` units; total 0 means unknown."""

    def warn(self, text: str) -> None:
        """Something that the user should know, and that does not end the loop; the same text counts once."""


class _SilentTask:
    def advance(self, amount: int = 1, note: str = "") -> None:
        return None


class SilentProgress:
    """Reports nowhere; the default outside the command line."""

    def task(self, name: str, total: int) -> Task:
        """A task that reports nowhere."""
        return _SilentTask()

    def warn(self, text: str) -> None:
        """Python's own warning: nobody else is there to tell."""
        warnings.warn(text, RuntimeWarning, stacklevel=2)


SILENT = SilentProgress()
