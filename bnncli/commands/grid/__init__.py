"""grid: run a pipeline over a grid of settings."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import check_writable, write_error
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import CheckFailed, UsageError
from bnncli.names import count_noun
from bnncli.options.command import Argument, Command, CommandLine, CommonOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.session.run import Result, Run, Table

if TYPE_CHECKING:
    from bnncli.commands.grid.plan import Job
    from bnncli.commands.grid.running import Journal, LineEnd


@dataclass(frozen=True)
class GridOptions(CheckedOptions):
    """Options of grid."""

    jobs: int | None = option(
        None,
        "Run this many jobs in parallel on the CPU. Default: one at a time, on a GPU if there is one.",
        minimum=1,
        maximum=1024,
    )
    devices: str | None = option(
        None,
        "GPUs to run on, such as 0,1,2,3. Each runs one job at a time; cpu adds one job on the CPU.",
        metavar="N,N",
    )
    dir: str | None = option(
        None, "Folder for state and logs. Default: FILE.grid beside FILE.", metavar="DIR", writes=True
    )
    dry_run: bool = option(False, "Print the commands that would run, without running them.", short="-n")
    slurm: bool = option(False, "Print a SLURM array job for these commands, without running them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.places
        if self.jobs is not None and self.devices is not None:
            raise UsageError("\0jobs\0 and \0devices\0 are mutually exclusive: each GPU runs one job at a time")
        if self.slurm and (self.jobs is not None or self.devices is not None or self.dry_run):
            raise UsageError("\0slurm\0 only prints a job script: drop \0jobs\0, \0devices\0 and \0dry_run\0")

    @property
    def places(self) -> list[str]:
        """Return the devices of --devices, each a number or cpu; empty without it."""
        found = [] if self.devices is None else [one.strip() for one in self.devices.split(",")]
        for one in found:
            if one != "cpu" and not re.fullmatch(r"[0-9]{1,4}", one):
                raise UsageError(f"\0devices\0: expected GPU numbers and cpu, such as 0,1,2,3; got {self.devices!r}")
            if found.count(one) > 1:
                raise UsageError(f"\0devices\0: {one} is given twice; each device runs one job at a time")
        return found


COMMAND = Command(
    "Run commands over many checkpoints and options in parallel.",
    "FILE is a TOML file with `checkpoints`, and [[step]] tables with `command` and its options; a list of values is "
    "an axis. {NAME} refers to the posterior of an earlier step, {NAME*} to all of that step's posteriors. To "
    "complete an interrupted grid, run it again. Exits 3 if a job failed, 78 if FILE is wrong.",
    (GridOptions, CommonOptions),
    (
        "bnncli grid grid.toml --dry-run",
        "bnncli grid grid.toml --devices 0,1,2,3",
        "bnncli grid grid.toml --jobs 4",
        "bnncli grid grid.toml --slurm | sbatch --gpus=1 --time=2:00:00",
    ),
    (Argument("file", "The grid, a TOML file."),),
    section="Research",
    place=40,
)


_WAIT = 1.0  # seconds: of a grid that was killed just now a line that was to begin may hold the lock a moment longer
_HELD = (
    "another bnncli process runs this grid",
    "wait until it ends, or stop it and run this again to continue from there",
)


def execute(run: Run, options: GridOptions) -> Result:
    """Run the lines, or print them with --dry-run. The result says how each ended."""
    from bnncli.commands.grid.plan import list_places, plan_jobs, read_grid
    from bnncli.commands.grid.running import Journal, Schedule, check_apart

    file = Path(run.arguments["file"])
    grid = read_grid(file)
    jobs = plan_jobs(grid)
    check_apart(grid, jobs)
    if options.slurm:
        return _write_slurm_script(run, jobs, file)
    places = list_places(options, jobs)
    folder = file.with_name(f"{file.name}.grid") if options.dir is None else Path(options.dir)
    if options.dry_run:
        return _build_plan_result(run, jobs, Journal.read(folder, run))
    check_writable(folder, hint="choose another place with \0dir\0")
    with artifact_lock(folder / ".lock", wait=_WAIT, poll=run.console.poll, held=_HELD):
        journal = Journal.read(folder, run)
        try:
            journal.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, journal.logs) from None
        ended = Schedule(run, jobs, places, journal).work()
    return _result(run, jobs, ended, journal)


def _write_slurm_script(run: Run, jobs: list[Job], file: Path) -> Result:
    """Return the script of a Slurm array job."""
    from bnncli.commands.grid.running import build_run_line, program

    lines = {job.number: build_run_line(job, run.console.options.config) for job in jobs}
    found = build_script(jobs, lines, file, program=program())
    return Result(lines=found, extra={"lines": [job.line.pasted() for job in jobs], "script": "\n".join(found) + "\n"})


MAX_TASKS = 1000  # SLURM's own limit is 1001 unless its administrator says otherwise (MaxArraySize)
_HEAD = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
# {count} lines of {file}. What a task takes is for sbatch to say, as --gpus=1 --time=2:00:00. After a kill submit it again: it goes on.
cd {folder} || exit 66
bnncli() {{ {program} "$@"; }}
declare -A failed
code=0
stopped=
trap 'stopped=143' TERM
run() {{ # number, numbers of those that it waits for, line
    local number=$1 after=$2 one
    shift 2
    [ -z "$stopped" ] || exit "$stopped"
    for one in $after; do
        if [ -n "${{failed[$one]}}" ]; then
            failed[$number]=1
            echo "left out, as line $one failed: $*" >&2
            return
        fi
    done
    "$@" && return
    [ -z "$stopped" ] || exit "$stopped"
    failed[$number]=1
    code=3
    echo "line $number failed: $*" >&2
}}
case "$SLURM_ARRAY_TASK_ID" in"""
_TAIL = """*)
    echo "expected SLURM_ARRAY_TASK_ID from 0 to {last}; got '$SLURM_ARRAY_TASK_ID'" >&2
    exit 2
    ;;
esac
exit $code"""


def build_script(jobs: list[Job], lines: Mapping[int, CommandLine], file: Path, *, program: list[str]) -> list[str]:
    """Return the lines of the script. A task exits with 3 where one of its lines failed.

    Args:
        lines: job number to its command line.
        program: words that run bnncli.
    """
    parts = split_chains(jobs)
    num_tasks = min(len(parts), MAX_TASKS)
    words = {
        "name": re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem),
        "last": num_tasks - 1,
        "count": len(jobs),
        "file": re.sub(r"[^ -~]", "?", str(file)),
        "folder": shlex.quote(str(Path.cwd())),
        "program": shlex.join(program),
    }
    found = _HEAD.format(**words).split("\n")
    for task in range(num_tasks):
        found.append(f"{task})")
        for job in (job for part in parts[task::num_tasks] for job in part):
            after = shlex.quote(" ".join(map(str, job.after)))
            found.append(f"    run {job.number} {after} {lines[job.number].pasted()}")
        found.append("    ;;")
    return [*found, *_TAIL.format(**words).split("\n")]


def split_chains(jobs: list[Job]) -> list[list[Job]]:
    """Split the lines into parts that do not wait for each other, each in order."""
    of = list(range(len(jobs)))

    def first(number: int) -> int:
        while of[number] != number:
            of[number] = of[of[number]]
            number = of[number]
        return number

    for job in jobs:
        for number in job.after:
            one, other = sorted((first(job.number), first(number)))
            of[other] = one
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(first(job.number), []).append(job)
    return list(found.values())


def _build_plan_result(run: Run, jobs: list[Job], journal: Journal) -> Result:
    """Return what would run."""
    from bnncli.commands.grid.running import read_seen

    config = run.console.options.config
    begun = [job for job in jobs if journal.done(job, jobs, read_seen(job, config)) is None]
    known = sum(journal.known[job.key].is_good for job in begun if job.key in journal.known)
    summary = f"{count_noun(len(jobs), 'line')}, {len(begun)} to start"
    if known:
        summary += f"; {known} of these finished before and will report what is up to date"
    lines = [job.line.pasted() for job in begun]
    return Result(lines=lines, extra={"lines": lines}, summary=[summary])


def _result(run: Run, jobs: list[Job], ended: Mapping[int, LineEnd], journal: Journal) -> Result:
    """Return a row for each line that failed or was skipped, or the paths of the results."""
    from bnncli.commands.grid.running import FAILED, SKIPPED

    entries = [_entry(job, ended[job.number], journal) for job in jobs]
    counts = Counter(one["state"] for one in entries)
    told = [f"{count} {state.replace('_', ' ')}" for state, count in counts.items()]
    if warned := sum(one["warnings"] > 0 for one in entries):
        told.append(f"{warned} with warnings")
    result = Result(
        extra={"jobs": entries, "counts": dict(counts), "dir": str(journal.folder)},
        summary=[f"{count_noun(len(jobs), 'line')}: {', '.join(told)}; logs and documents: {journal.logs}"],
    )
    bad = [job for job in jobs if not ended[job.number].is_good]
    if not bad:
        result.lines = list(
            dict.fromkeys(path for job in jobs for path in _list_outputs(job, ended[job.number], journal))
        )
        return result
    result.tables = [_table(bad, ended, journal)]
    failed, left = counts[FAILED], counts[SKIPPED]
    result.failure = CheckFailed(
        f"{failed} of {count_noun(len(jobs), 'line')} failed"
        + (f", and {left} that depend on them were skipped" if left else ""),
        hint=f"fix the errors above, then run the grid again to complete it: {run.line.pasted()}",
        code="jobs_failed",
    )
    return result


def _entry(job: Job, ended: LineEnd, journal: Journal) -> dict[str, Any]:
    """Return the entry of a job for --json."""
    began = ended.exit is not None
    return {
        "checkpoint": job.checkpoint,
        "name": job.name,
        "command": job.step.command,
        "line": job.line.pasted(),
        "state": ended.state,
        "exit": ended.exit,
        "seconds": ended.seconds,
        "why": ended.why,
        "outputs": list(ended.outputs),
        "warnings": ended.warnings,
        "log": str(journal.log(job)) if began else None,
        "document": str(journal.document(job)) if began else None,
    }


def _list_outputs(job: Job, ended: LineEnd, journal: Journal) -> tuple[str, ...]:
    """Return the outputs of a line: artifacts, or the document with its results."""
    return ended.outputs or (str(journal.document(job)),)


def _table(bad: list[Job], ended: Mapping[int, LineEnd], journal: Journal) -> Table:
    """Return a table of why lines failed or were skipped, followed by the failed lines, ready to paste."""
    rows = []
    for job in bad:
        one = ended[job.number]
        rows.append([job.checkpoint, job.name, "-" if one.exit is None else str(one.exit), one.why])
    failed = [job for job in bad if ended[job.number].exit is not None]
    notes = ["", f"failed lines, to run one at a time (logs: {journal.logs}):", *(job.line.pasted() for job in failed)]
    return Table(["checkpoint", "job", "exit", "why"], rows, notes=notes)
