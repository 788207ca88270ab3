"""Lines of a grid as processes: begun, looked at, ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from bnncli.errors import BnnError, DataError, Exit, MissingInput
from bnncli.names import printable
from bnncli.options.command import CommandLine
from bnncli.stages.grid.journal import DONE, FAILED, UP_TO_DATE, Ended, Journal
from bnncli.stages.grid.places import LinePlace
from bnncli.stages.grid.plan import Job
from bnncli.system.input_files import read_object

# What torchrun tells a process: a line of a grid is no worker of whoever started the grid.
_OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}
_WAIT = 60  # seconds for a lock: the lines of a grid that was killed may still be saving their states
GRACE = 60.0  # seconds that lines have to save their states, before they are killed
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: a process that was just forked looks for nothing


def program() -> list[str]:
    """The words that run bnncli as this process does; like the console script, without the folder where it is run among Python's own."""
    is_safe = os.getcwd() not in sys.path
    return [sys.executable, *(["-P"] if is_safe else []), "-m", "bnncli"]


def as_run(job: Job, config: str | None) -> CommandLine:
    """The line as the grid runs it: with the configuration file that the grid was given, and patient with locks."""
    line = job.line.having("config", config)
    return line.having("wait", _WAIT) if "wait" in job.step.options and not line.gives("wait") else line


@dataclass
class Running:
    """A line that runs.

    Args:
        journal: where its document and log lie.
        started: when, by the monotonic clock.
    """

    job: Job
    journal: Journal
    process: subprocess.Popen[bytes]
    started: float

    @classmethod
    def start(cls, job: Job, place: LinePlace, journal: Journal, *, config: str | None) -> Running:
        """The line, begun in a process group of its own: what a terminal tells all processes is for the grid to pass on."""
        words = [*program(), *as_run(job, config).words()[1:], "--json", "--progress", "log"]
        environment = {name: value for name, value in os.environ.items() if not _is_of_torchrun(name)}
        document = journal.document(job)
        document.unlink(missing_ok=True)  # a line of a grid that was killed may still be writing its own
        with open(document, "wb") as results, open(journal.log(job), "ab") as said:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=results,
                stderr=said,
                env=environment | dict(place.environment),
                process_group=0,
                preexec_fn=partial(die_with, os.getpid()),
            )
        return cls(job, journal, process, time.monotonic())

    def ended(self) -> Ended | None:
        """How it ended; None while it runs. Raises ReadError where what it has said cannot be read."""
        code = self.process.poll()
        if code is None:
            return None
        code = 128 - code if code < 0 else code
        told, seconds = self._told(), round(time.monotonic() - self.started, 3)
        outputs = tuple(str(one["path"]) for one in told.get("outputs", []) if isinstance(one, dict) and "path" in one)
        warnings = len(told.get("warnings", []))
        if code == Exit.OK and told:
            state = UP_TO_DATE if told.get("action") == "up_to_date" else DONE
            return Ended(state, code, seconds, outputs=outputs, warnings=warnings)
        return Ended(FAILED, code, seconds, self._why(told, code), outputs, warnings)

    def _told(self) -> dict[str, Any]:
        """Its document; nothing where it ended before it wrote one. Raises ReadError where the disk does not give it."""
        try:
            return read_object(self.journal.document(self.job))
        except (MissingInput, DataError):
            return {}

    def _why(self, told: dict[str, Any], code: int) -> str:
        """Why it failed, in one line, and what to do."""
        error = told.get("error")
        if isinstance(error, dict) and error.get("message"):
            return printable(str(error["message"]) + BnnError("", hint=error.get("hint")).advice)
        if code == 128 + signal.SIGKILL:
            return "killed by SIGKILL, probably because the system ran out of memory"
        if code > 128:
            return f"ended by {_signal_name(code - 128)}"
        try:
            lines = self.journal.log(self.job).read_bytes().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"cannot read its log: {os.strerror(error.errno or 0)}"
        return printable(lines[-1])[:300] if lines else "it printed nothing"


def stop(running: list[Running], *, grace: float = GRACE) -> None:
    """End lines, which save their states; those that have not after a while, in seconds, are killed."""
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
    deadline = time.monotonic() + grace
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def die_with(parent: int) -> None:
    """What a new process does first: it will be told to stop when the process that began it is gone, however that went."""
    if _PRCTL is not None:  # Linux; elsewhere a grid that is killed leaves its lines to end by themselves
        _PRCTL(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # gone before it could be asked for
        os._exit(128 + signal.SIGTERM)


def _is_of_torchrun(name: str) -> bool:
    return name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
