"""Log lines, warnings and progress of a running command, all on stderr.

On a terminal, progress is a bar. Elsewhere it is a log line after the first second, at the end, and every 30 seconds or
5 %, whichever is rarer, so that a long cron job neither looks dead nor floods its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from bnncli.errors import BnnError
from bnncli.names import printable
from bnncli.options.command import CommonOptions
from bnncli.options.declaration import spell_options
from bnncli.progress import Task
from bnncli.system import signals

FIRST_LOG_SECONDS = 1.0
LOG_EVERY_SECONDS = 30.0
LOG_EVERY_SHARE = 0.05


@dataclass
class Console:
    """The only writer to stderr. Collects warnings for the JSON result and the provenance."""

    command: str
    options: CommonOptions
    warnings: list[str] = field(default_factory=list)
    is_terminal: bool = field(init=False)  # checked once, because a live bar replaces stderr
    _file: TextIO | None = None
    _rich: Any = None
    _live: Any = None

    def __post_init__(self) -> None:
        self.is_terminal = _can_redraw(sys.stderr)
        if self.options.log_file is not None:
            self._file = open(self.options.log_file, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115

    def debug(self, text: str) -> None:
        """Write a line if -v is given."""
        if self.options.verbose >= 1:
            self._line("DEBUG", text)

    def info(self, text: str) -> None:
        """Write a line unless -q is given."""
        self._line("INFO", spell_options(text))

    def warn(self, text: str) -> None:
        """Write a warning unless -q is given, and record it for the result and the provenance."""
        text = spell_options(text)
        if text not in self.warnings:
            self.warnings.append(text)
            self._line("WARNING", text)

    def error(self, error: BnnError) -> None:
        """Write the error and its hint as the last two lines."""
        self._line("ERROR", error.message)
        if error.hint:
            self._line("HINT", error.hint)

    def traceback(self, error: BaseException) -> None:
        """Write a traceback, escaped like every other line."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._write(printable(spell_options(line)))

    def poll(self, where: str = "") -> None:
        """Raise Interrupted if a signal has arrived."""
        signals.raise_if_interrupted(where)

    def task(self, name: str, total: int) -> Task:
        """Open a progress task, shown according to --progress."""
        style = self.options.progress
        if style == "auto":
            style = "bar" if self.is_terminal else "log"
        if self.options.quiet or style == "none":
            return _QuietTask()
        return _BarTask(self, name, total) if style == "bar" else _LogTask(self, name, total)

    def bar(self) -> Any:
        """Return the command's live rich bar, started on first use."""
        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._rich = RichConsole(file=sys.stderr)
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._rich,
                transient=True,
            )
            self._live.start()
        return self._live

    def stop_bar(self) -> None:
        """Remove the bar from the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        """Remove the bar and close the log file."""
        self.stop_bar()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _line(self, level: str, text: str) -> None:
        text = printable(spell_options(text))
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if self._file is not None:
            print(self._format(level, text, stamp), file=self._file, flush=True)
        if self.options.quiet and level not in ("ERROR", "HINT"):
            return
        if self.options.log_format == "json":
            shown = self._format(level, text, stamp)
        elif level in ("ERROR", "HINT"):
            shown = f"{level.lower()}: {text}"
        elif self.is_terminal:
            shown = f"warning: {text}" if level == "WARNING" else text
        else:
            shown = self._format(level, text, stamp)
        self._write(shown)

    def _format(self, level: str, text: str, stamp: str) -> str:
        if self.options.log_format == "json":
            return json.dumps({"time": stamp, "level": level, "command": self.command, "message": text})
        return f"{stamp} {level} {self.command} {text}"

    def _write(self, line: str) -> None:
        """Write a line to stderr, ignoring a closed or broken stderr."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._live is not None:
                self._rich.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                encoding = sys.stderr.encoding or "ascii"
                print(line.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr, flush=True)


def _can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can redraw lines, outside CI."""
    with contextlib.suppress(ValueError, AttributeError):
        return stream.isatty() and os.environ.get("TERM") != "dumb" and "CI" not in os.environ
    return False


class _QuietTask:
    def advance(self, amount: int = 1, note: str = "") -> None:
        signals.raise_if_interrupted()


class _BarTask:
    def __init__(self, console: Console, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._bar = console.bar()
        for earlier in self._bar.tasks:
            if earlier.total is None:  # a loop of unknown length ends where the next begins
                self._bar.update(earlier.id, visible=False)
        self._id = self._bar.add_task(name, total=total or None, note="")

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        signals.raise_if_interrupted(f"{self._name} {self._done}" + (f"/{self._total}" if self._total else ""))
        fields = {"note": note} if note else {}
        self._bar.update(self._id, advance=amount, **fields)
        if self._total and self._done >= self._total:
            self._bar.update(self._id, visible=False)


class _LogTask:
    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console, self._name, self._total, self._done = console, name, total, 0
        self._start = self._last_time = time.monotonic()
        self._last_done = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        signals.raise_if_interrupted(f"{self._name} {self._done}" + (f"/{self._total}" if self._total else ""))
        now = time.monotonic()
        is_last = self._total > 0 and self._done >= self._total
        share = (self._done - self._last_done) / self._total if self._total else 1.0
        is_first = self._last_time == self._start and now - self._start >= FIRST_LOG_SECONDS
        is_late, is_unbegun = now - self._last_time >= LOG_EVERY_SECONDS, self._total > 0 and not self._done
        is_due = is_first or (is_late and (share >= LOG_EVERY_SHARE or is_unbegun))
        if not is_last and (not is_due or (is_unbegun and not note)):
            return
        elapsed = now - self._start
        if is_last and elapsed < FIRST_LOG_SECONDS:
            return  # too short a loop to log
        self._last_time, self._last_done = now, self._done
        remaining = elapsed * (self._total - self._done) / self._done if self._total and self._done else 0.0
        tail = f"took={elapsed:.0f}s" if is_last else f"eta={remaining:.0f}s"
        if is_unbegun:  # no estimate before the first step
            tail = f"after={elapsed:.0f}s"
        self._console.info(f"{self._name} {self._done}/{self._total or '?'} {note + ' ' if note else ''}{tail}")
