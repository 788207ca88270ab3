"""Commands in this process or in one of their own, on a device of one's choice, and what they gave back."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bnncli
from bnncli.cli.commands import own_commands
from bnncli.cli.execute import run_command_line
from bnncli.options.command import CommonOptions, ComputeOptions

BNNCLI = (sys.executable, "-m", "bnncli")  # what starts a command in a process of its own


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
    """The name of a line's command, as own_commands() has it."""
    words = line.split()
    return "-".join(words[:2]) if words[0] == "config" else words[0]


def takes_device(line: str) -> bool:
    """Whether its command computes, so that it has a --device."""
    (command,) = (command for command in own_commands() if command.name == command_of(line))
    return ComputeOptions in command.groups


def run_line(line: str, folder: Path, device: str, *words: str) -> Done:
    """Runs one line: FOLDER in it is the folder, and `words` are added; a command that computes does so on the device.

    A signal ends the command, and with SystemExit what runs it.
    """
    argv = _arguments(line, folder, device, words)
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
    return Done(line, folder, code, _document(results.getvalue()), errors.getvalue(), seconds)


@dataclass(frozen=True)
class Started:
    """A command at work in a process of its own."""

    line: str
    folder: Path
    process: subprocess.Popen[str]
    start: float

    def wait(self, seconds: float) -> Done:
        """Return what the command gave back; one that takes longer is ended, and its code is that of the signal."""
        try:
            text, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its workers
            try:
                text, errors = self.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                text, errors = self.process.communicate()
            errors += f"\nended after {seconds:.0f} s"
        taken = time.perf_counter() - self.start
        return Done(self.line, self.folder, self.process.returncode, _document(text), errors, taken)


def start_line(
    line: str, folder: Path, device: str, *words: str,
    launcher: Sequence[str] = BNNCLI, environment: Mapping[str, str] | None = None,
) -> Started:  # fmt: skip
    """Start one line in a process of its own.

    Args:
        launcher: the words before the command's.
        environment: variables that differ from this process's.
    """
    package = str(Path(bnncli.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    process = subprocess.Popen(
        [*launcher, *_arguments(line, folder, device, words)], text=True, cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
    )  # fmt: skip
    return Started(line, folder, process, start)


def _arguments(line: str, folder: Path, device: str, words: Sequence[str]) -> list[str]:
    """Return the command's words, with what makes it print one document."""
    argv = [word.replace("FOLDER", str(folder)) for word in line.split()] + list(words)
    (command,) = (command for command in own_commands() if command.name == command_of(line))
    if takes_device(line):
        argv += ["--device", device]
    if CommonOptions in command.groups:
        argv += ["--json", "--progress", "none"]
    return argv


def _document(text: str) -> dict[str, Any]:
    """Return the JSON document that a command printed; {} where it printed none, or was killed in its midst."""
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else {}
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


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
