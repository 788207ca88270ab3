"""Commands in this process, on a device of one's choice, and what they gave back."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.cli.commands import COMMANDS
from bnncli.cli.execute import run_command_line
from bnncli.options import CommonOptions, ComputeOptions


@dataclass(frozen=True)
class Done:
    """One command that ended.

    Args:
        folder: that the command worked in: paths of outputs are told relative to it.
        document: its one JSON document, {} where it printed none.
    """

    line: str
    folder: Path
    code: int
    document: dict[str, Any]
    stderr: str
    seconds: float

    @property
    def digests(self) -> dict[str, str]:
        """The content digest of every output, by its path within the folder."""
        return {self._within(output["path"]): output["content_digest"] for output in self.document.get("outputs", [])}

    @property
    def failure(self) -> str:
        """Exit code and last words of a command that failed."""
        return f"exit {self.code}: {' '.join(self.stderr.split())[-300:]}"

    def _within(self, path: str) -> str:
        return str(Path(path).resolve().relative_to(self.folder.resolve()))


def command_of(line: str) -> str:
    """The name of a line's command, as COMMANDS has it."""
    words = line.split()
    return "-".join(words[:2]) if words[0] == "config" else words[0]


def takes_device(line: str) -> bool:
    """Whether its command computes, so that it has a --device."""
    (command,) = (command for command in COMMANDS if command.name == command_of(line))
    return ComputeOptions in command.groups


def run_line(line: str, folder: Path, device: str, *words: str) -> Done:
    """Runs one line: FOLDER in it is the folder, and `words` are added; a command that computes does so on the device.

    A signal ends the command, and with SystemExit what runs it.
    """
    argv = [word.replace("FOLDER", str(folder)) for word in line.split()] + list(words)
    (command,) = (command for command in COMMANDS if command.name == command_of(line))
    if takes_device(line):
        argv += ["--device", device]
    if CommonOptions in command.groups:
        argv += ["--json", "--progress", "none"]
    results, errors, before = io.StringIO(), io.StringIO(), sys.stderr
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    start = time.perf_counter()
    sys.stderr = errors
    try:
        code = run_command_line(argv, results)
    finally:
        sys.stderr = before
        for name, handler in handlers.items():  # or what is no command would not end at a signal
            signal.signal(name, handler)
    seconds = time.perf_counter() - start
    if code > 128:  # a signal, which the command took for its own
        raise SystemExit(code)
    text = results.getvalue()
    document = json.loads(text) if text.lstrip().startswith("{") else {}
    return Done(line, folder, code, document, errors.getvalue(), seconds)


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of the folder, for a command that may change it; gone afterwards."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
