"""What the commands say, as it is said to Python: options are keywords, warnings are Python's, a hint is a note."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bnncli.errors import BnnError, BnnWarning, UsageError, machine_error
from bnncli.options.common import CommonOptions
from bnncli.options.declaration import spelled
from bnncli.progress import SILENT, Task

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def keywords(text: str) -> str:
    """A message with a keyword for each option that it means: as samples."""
    return str(spelled(text, str))


@contextmanager
def errors_in_python() -> Iterator[None]:
    """Errors of ours leave the block in the words of Python, what to do standing in a note that a traceback shows.

    Ctrl-C is nobody's error: a process that is not ours has it raised as KeyboardInterrupt, in code of the user's too.
    """
    try:
        yield
    except BnnError as error:
        if (pressed := _interruption(error)) is not None:
            raise pressed from None
        _say(error)
        raise
    except Exception as error:
        known = machine_error(error)
        if known is None:
            raise
        _say(known)
        raise known from error


def _say(error: BnnError) -> None:
    """Put an error into the words of Python."""
    error.message = keywords(error.message)
    shown = error.__cause__ is not None and error.code == "user_code"  # by Python itself, whatever a command would show
    error.hint = None if error.hint is None or shown else keywords(error.hint)
    error.args = (error.message,)
    note = error.advice.removeprefix("; ")
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def exits_refused() -> Iterator[None]:
    """Code that calls exit() inside the block does not end the process. Raises UsageError instead, as for a command."""
    try:
        yield
    except SystemExit as error:
        raise UsageError(f"user code called exit({error.code!r})") from error


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that an error was made of; None for any other."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


class Listener:
    """What a run talks to where nobody watches a terminal: warnings become Python's, the rest is not said."""

    def __init__(self) -> None:
        self.options = CommonOptions(quiet=True)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """One warning a text, at the line of the caller's that asked."""
        text = keywords(text)
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, BnnWarning, stacklevel=_depth_of_caller())

    def debug(self, text: str) -> None:
        """Nothing."""

    def info(self, text: str) -> None:
        """Nothing."""

    def poll(self, where: str = "") -> None:
        """Nothing: Python raises KeyboardInterrupt itself."""

    def task(self, name: str, total: int) -> Task:
        """A task that reports nowhere."""
        return SILENT.task(name, total)


def _depth_of_caller() -> int:
    """How many calls up from `warn` the outermost line of this package was called, as warnings count them."""
    depth, found, frame = 1, 1, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
        if frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            found = depth
    return found + 1
