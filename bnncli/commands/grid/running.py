"""Run the lines of a grid with make: each leaves a stamp when it has succeeded. Or print them for make and Snakemake."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import write_error
from bnncli.commands.grid.plan import WRITTEN, Job
from bnncli.errors import BnnError, DataError, DeviceError, Interrupted, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.names import count_noun, printable
from bnncli.session.run import Run
from bnncli.system import signals
from bnncli.system import workers as team
from bnncli.system.devices import CPU, GPU_POOL, VISIBLE, device_name, share_threads
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from bnncli.commands.grid import GridOptions

_ANYWHERE = ("auto", CPU)  # devices of a line that the grid places
_PLAIN = re.compile(r"[\w ./+@,-]+")  # paths that make and Snakemake take
_WAIT = 60  # seconds for a lock: the lines of a grid that was killed may still be saving their states


@dataclass(frozen=True)
class Line:
    """A job with its files in the folder of the grid.

    Args:
        folder: of the grid.
        config: the configuration file that the grid was given.
        needs: stamps of the lines it waits for, its checkpoint and its configuration file.
    """

    job: Job
    folder: Path
    config: str | None
    needs: list[str]

    def path(self, suffix: str) -> Path:
        """Return one of its files: .done is its stamp, .json its document, .log what it said."""
        return self.folder / self.job.step.name / f"{self.job.stem}{suffix}"

    @property
    def stamp(self) -> Path:
        """Return the file that is there once it has succeeded."""
        return self.path(".done")

    @property
    def document(self) -> dict[str, Any]:
        """Return the JSON document of its last run; empty where it ended before it wrote one. Raises ReadError."""
        try:
            return read_object(self.path(".json"))
        except (MissingInput, DataError):
            return {}

    @property
    def outputs(self) -> list[str]:
        """Return the paths of its artifacts."""
        return [one["path"] for one in self.document.get("outputs", [])]

    def words(self) -> list[str]:
        """Return the words of its command line, after `bnncli`."""
        line = self.job.line.having("config", self.config)
        if "wait" in self.job.step.options and not line.gives("wait"):
            line = line.having("wait", _WAIT)
        return [*line.words()[1:], "--json", "--progress", "log"]

    def is_done(self) -> bool:
        """Return whether it has succeeded, what it made is there, and what it read is older."""
        if not self.stamp.is_file():
            return False
        document, when = self.document, self.stamp.stat().st_mtime_ns
        made = [*self.outputs, *(self.job.given[option] for option in WRITTEN if option in self.job.given)]
        read = [*self.needs, *(one["path"] for one in document.get("inputs", []))]
        is_old = all(os.stat(path).st_mtime_ns <= when for path in read if os.path.exists(path))
        return bool(document) and is_old and all(os.path.exists(path) for path in made)


def place_lines(jobs: Sequence[Job], folder: Path, config: str | None) -> list[Line]:
    """Return the lines of a grid. Raises UsageError if make cannot name its folder."""
    if not _PLAIN.fullmatch(str(folder)):
        said = f"make needs a folder named by letters, digits, spaces and ._-+,@ only; got {folder}"
        raise UsageError(f"\0dir\0: {said}")
    lines: list[Line] = []
    for job in jobs:
        stamps = [str(lines[number].stamp) for number in job.after]
        files = [name for name in (job.checkpoint, config or "bnncli.toml") if Path(name).is_file()]
        lines.append(Line(job, folder, config, [*stamps, *files]))
    return lines


def find_unfinished(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that are not done, or wait for one that is not."""
    found: dict[int, Line] = {}
    for line in lines:
        if not line.is_done() or any(number in found for number in line.job.after):
            found[line.job.number] = line
    return list(found.values())


_MAKEFILE = """\
# {count} of a grid; run in the folder where it was made: make -k -j 4
BNNCLI := {program}
HASH := \\#
MAKEFLAGS += --no-builtin-rules
define run
@mkdir -p "$$(dirname "$@")" && rm -f "$@"; exec $(BNNCLI) $(LINE) > "$(@:.done=.json)" 2>> "$(@:.done=.log)"
touch "$@"
endef
.PHONY: all
all: {stamps}
"""


def write_makefile(lines: Sequence[Line]) -> str:
    """Return a Makefile with a rule for each line. It has no tabs, which a terminal would not show."""
    own, stamps = shlex.join(program()).replace("$", "$$").replace("#", "\\#"), [str(line.stamp) for line in lines]
    found = _MAKEFILE.format(count=count_noun(len(lines), "line"), program=own, stamps=_escape(stamps))
    for line in lines:
        words = shlex.join(line.words()).replace("$", "$$").replace("#", "$(HASH)")
        name = _escape([str(line.stamp)])
        found += f"{name}: LINE = {words}\n{name}: {_escape(line.needs)} ; $(run)\n"
    return found


def _escape(paths: Sequence[str]) -> str:
    """Return paths as make reads them, without those that it cannot read."""
    return " ".join(path.replace(" ", "\\ ") for path in paths if _PLAIN.fullmatch(path))


_SNAKEFILE = """\
# {count} of a grid; run in the folder where it was made:
# snakemake --executor slurm --jobs 100 --keep-going --default-resources slurm_partition=gpu gpu=1 runtime=120
FOLDER = {folder}
# of each line, what it needs and its command
LINES = {lines}
rule:
    input: [f"{{FOLDER}}/{{name}}.done" for name in LINES]
for step in dict.fromkeys(name.split("/")[0] for name in LINES):
    rule:
        name: step
        input: lambda found, step=step: LINES[f"{{step}}/{{found.line}}"][0]
        output: touch(f"{{FOLDER}}/{{step}}/{{{{line}}}}.done")
        params: line=lambda found, step=step: LINES[f"{{step}}/{{found.line}}"][1]
        shell: "{{params.line}}"
"""


def write_snakefile(lines: Sequence[Line]) -> str:
    """Return a Snakefile with a rule for each step."""
    found = {}
    for line in lines:
        told = f"> {shlex.quote(str(line.path('.json')))} 2>> {shlex.quote(str(line.path('.log')))}"
        command = f"{shlex.join([*program(), *line.words()])} {told}"
        found[f"{line.job.step.name}/{line.job.stem}"] = (line.needs, command)
    folder = json.dumps(str(lines[0].folder))
    return _SNAKEFILE.format(count=count_noun(len(lines), "line"), folder=folder, lines=json.dumps(found, indent=1))


def program() -> list[str]:
    """Return the words that run bnncli as this process does; like the console script, without the folder where it is run among Python's own."""
    is_safe = os.getcwd() not in sys.path
    return [sys.executable, *(["-P"] if is_safe else []), "-m", "bnncli"]


def choose_places(options: GridOptions, jobs: Sequence[Job]) -> tuple[int, dict[str, str]]:
    """Return how many lines run at a time, and variables that they have beside those of this process.

    Raises:
        UsageError: started by torchrun, or a line names another device itself.
        DeviceError: a GPU does not exist.
    """
    if team.rank_and_size() is not None:
        raise UsageError(
            "grid starts its own processes: run it without torchrun",
            hint="\0devices\0 0,1,2,3 runs a line on each GPU; \0jobs\0 4 runs four on the CPU",
        )
    if options.jobs is None and options.devices is None:
        return 1, {}
    for job in jobs:
        if job.given.get("device", CPU) not in _ANYWHERE:
            flag = "\0devices\0" if options.jobs is None else "\0jobs\0"
            where = job.step.keys.get("device", job.step.where)
            raise UsageError(f"{where}: {flag} sets where lines run; omit device or {flag}")
    if options.jobs is not None:
        return options.jobs, {VISIBLE: "", **share_threads(options.jobs)}
    visible = _find_visible_gpus([int(one) for one in options.places if one != CPU])
    names = [CPU if one == CPU else visible[int(one)] for one in options.places]
    return len(names), {GPU_POOL: ",".join(names), **share_threads(len(names))}


def _find_visible_gpus(numbers: list[int]) -> dict[int, str]:
    """Return CUDA's names of these GPUs, which are numbered among those this process may see."""
    if not numbers:
        return {}
    count = 0 if device_name("auto") == CPU else torch.cuda.device_count()
    missing = [number for number in numbers if number >= count]
    if missing:
        there = f"have {count}, numbered from 0" if count else "PyTorch finds no GPU on this machine"
        raise DeviceError(
            f"\0devices\0: no GPU {missing[0]}: {there}",
            hint="use the CPU with \0jobs\0 N or \0devices\0 cpu",
        )
    names = [one.strip() for one in os.environ.get(VISIBLE, "").split(",") if one.strip()]
    return {number: names[number] if names else str(number) for number in numbers}


DONE, UP_TO_DATE, FAILED, SKIPPED = "done", "up_to_date", "failed", "skipped"


@dataclass(frozen=True)
class LineEnd:
    """End of a line.

    Args:
        state: done, up_to_date, failed or skipped.
        exit: its exit code, if it ran and that is known.
        why: it failed, or was skipped.
    """

    state: str
    exit: int | None = None
    why: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether lines that wait for it may begin."""
        return self.state in (DONE, UP_TO_DATE)


_MAKEFILE_NAME, _LOG = "grid.mk", "grid.mk.log"  # --dir may be a folder with a Makefile of its own
_POLL = 0.2  # seconds between looks at what make has said
_ENDED = re.compile(r"/([^/]+)\.done\] (.+)$")  # of a line that failed, as make says it
_ENGLISH = {"LANGUAGE": "en"}  # the messages that are read here
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # what a make that runs this process tells it


def run_lines(run: Run, lines: Sequence[Line], count: int, environment: dict[str, str]) -> list[LineEnd]:
    """Run what is unfinished, so many lines at a time, and return the end of each line.

    Raises:
        DeviceError: there is no make.
        OutputExists, WriteError: the folder of the grid cannot be written.
        Interrupted: a signal has come; what ran has been ended, and goes on when the grid is run again.
    """
    make = shutil.which("make")
    if make is None:
        hint = "install make, or run the lines with Snakemake: bnncli grid FILE --snakefile"
        raise DeviceError("grid runs its lines with make, which is not installed", hint=hint, code="no_make")
    folder, unfinished = lines[0].folder, find_unfinished(lines)
    makefile, log = folder / _MAKEFILE_NAME, folder / _LOG
    try:
        makefile.write_bytes(os.fsencode(write_makefile(lines)))
        for line in unfinished:
            line.stamp.unlink(missing_ok=True)
            line.path(".json").unlink(missing_ok=True)
        log.unlink(missing_ok=True)  # a make that was killed may still write its own
        said = open(log, "wb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise write_error(error, folder) from None
    with said:
        process = subprocess.Popen(
            [make, "-k", f"-j{count}", "-f", str(makefile)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={
                **{name: text for name, text in os.environ.items() if name not in _OF_MAKE},
                **_ENGLISH,
                **environment,
            },
            process_group=0,  # what a terminal tells all processes is for the grid to pass on
            preexec_fn=partial(signals.die_with, os.getpid()),
        )
    try:
        told = _follow(run, unfinished, process, log)
    except Interrupted as error:
        error.hint = f"continue with: {run.line.pasted()}"
        raise
    finally:
        stop(process)
    return _list_ends(lines, {line.job.number for line in unfinished}, told)


def _follow(run: Run, lines: Sequence[Line], process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    """Tell how lines end, until make ends. Return what it said of those that failed, by their stems.

    Raises:
        Interrupted: a signal has come.
    """
    task, ahead = run.console.task("grid", len(lines)), list(lines)
    told: dict[str, str] = {}
    with open(log, encoding="utf-8", errors="replace") as said:
        is_last = False
        while not is_last:
            is_last = process.poll() is not None
            for text in said:
                if (found := _ENDED.search(text.rstrip())) is not None:
                    told[found[1]] = found[2]
            new = [line for line in ahead if line.job.stem in told or line.stamp.exists()]
            for line in new:
                ended = _end(line, told, [])
                warned = len(line.document.get("warnings", []))
                more = f": {ended.why}" if ended.why else f", {count_noun(warned, 'warning')}" if warned else ""
                run.console.info(f"{line.job.label}: {ended.state.replace('_', ' ')}{more}")
            ahead = [line for line in ahead if line not in new]
            task.advance(len(new))
            if not is_last:
                time.sleep(_POLL)
    return told


def _list_ends(lines: Sequence[Line], unfinished: set[int], told: dict[str, str]) -> list[LineEnd]:
    """Return the end of each line."""
    ends: list[LineEnd] = []
    for line in lines:
        causes = [
            end.why if end.state == SKIPPED else f"it depends on {lines[number].job.label}"
            for number in line.job.after
            if not (end := ends[number]).is_good
        ]
        ends.append(_end(line, told, causes) if line.job.number in unfinished else LineEnd(UP_TO_DATE))
    return ends


def _end(line: Line, told: dict[str, str], causes: Sequence[str]) -> LineEnd:
    """Return the end of a line that was to run.

    Args:
        told: what make said of the lines that failed, by their stems: Error CODE, or a signal.
        causes: why it could not begin.
    """
    if line.stamp.exists():
        return LineEnd(UP_TO_DATE if line.document.get("action") == "up_to_date" else DONE, 0)
    if causes:
        return LineEnd(SKIPPED, None, causes[0])
    how = told.get(line.job.stem, f"make ended before it did; see {line.folder / _LOG}")
    code = int(how.removeprefix("Error ")) if how.startswith("Error ") else None
    error = line.document.get("error")
    if isinstance(error, dict) and error.get("message"):
        how = str(error["message"]) + BnnError("", hint=error.get("hint")).advice
    elif how == "Killed":
        how = "killed, probably because the system ran out of memory"
    elif code is not None:
        log = line.path(".log")
        said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        how = said[-1][:300] if said else "it printed nothing"
    return LineEnd(FAILED, code, printable(how))


def stop(process: subprocess.Popen[bytes], *, grace: float = signals.GRACE) -> None:
    """End make, which ends its lines: they save their states. What has not ended after a while, in seconds, is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
