"""grid: checkpoints times options as lines of a file, run side by side, and gone on with after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import check_writable, write_error
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import CheckFailed
from bnncli.names import counted
from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.options.grid import GridOptions
from bnncli.session.run import Result, Run, Table
from bnncli.stages.grid.apart import check_apart
from bnncli.stages.grid.journal import FAILED, SKIPPED, Ended, Journal
from bnncli.stages.grid.places import places_of
from bnncli.stages.grid.plan import Job, plan_jobs
from bnncli.stages.grid.reader import read_grid
from bnncli.stages.grid.running import as_run, program
from bnncli.stages.grid.schedule import Schedule
from bnncli.stages.grid.seen import seen_by
from bnncli.stages.grid.slurm import script

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


def run(run: Run, options: GridOptions) -> Result:
    """Run the lines, or print them; the result has how each ended."""
    file = Path(run.arguments["file"])
    grid = read_grid(file)
    jobs = plan_jobs(grid)
    check_apart(grid, jobs)
    if options.slurm:
        return _for_slurm(run, jobs, file)
    places = places_of(options, jobs)
    folder = file.with_name(f"{file.name}.grid") if options.dir is None else Path(options.dir)
    if options.dry_run:
        return _planned(run, jobs, Journal.read(folder, run))
    check_writable(folder, hint="choose another place with \0dir\0")
    with artifact_lock(folder / ".lock", wait=_WAIT, poll=run.console.poll, held=_HELD):
        journal = Journal.read(folder, run)
        try:
            journal.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, journal.logs) from None
        ended = Schedule(run, jobs, places, journal).work()
    return _result(run, jobs, ended, journal)


def _for_slurm(run: Run, jobs: list[Job], file: Path) -> Result:
    """The script of an array job."""
    lines = {job.number: as_run(job, run.console.options.config) for job in jobs}
    found = script(jobs, lines, file, program=program())
    return Result(lines=found, extra={"lines": [job.line.pasted() for job in jobs], "script": "\n".join(found) + "\n"})


def _planned(run: Run, jobs: list[Job], journal: Journal) -> Result:
    """What would run."""
    config = run.console.options.config
    begun = [job for job in jobs if journal.done(job, jobs, seen_by(job, config)) is None]
    known = sum(journal.known[job.key].is_good for job in begun if job.key in journal.known)
    summary = f"{counted(len(jobs), 'line')}, {len(begun)} to start"
    if known:
        summary += f"; {known} of these finished before and will report what is up to date"
    lines = [job.line.pasted() for job in begun]
    return Result(lines=lines, extra={"lines": lines}, summary=[summary])


def _result(run: Run, jobs: list[Job], ended: Mapping[int, Ended], journal: Journal) -> Result:
    """How it went: a row for each line that did not end well, or the paths of what was made."""
    entries = [_entry(job, ended[job.number], journal) for job in jobs]
    counts = Counter(one["state"] for one in entries)
    told = [f"{count} {state.replace('_', ' ')}" for state, count in counts.items()]
    if warned := sum(one["warnings"] > 0 for one in entries):
        told.append(f"{warned} with warnings")
    result = Result(
        extra={"jobs": entries, "counts": dict(counts), "dir": str(journal.folder)},
        summary=[f"{counted(len(jobs), 'line')}: {', '.join(told)}; logs and documents: {journal.logs}"],
    )
    bad = [job for job in jobs if not ended[job.number].is_good]
    if not bad:
        result.lines = list(dict.fromkeys(path for job in jobs for path in _made(job, ended[job.number], journal)))
        return result
    result.tables = [_table(bad, ended, journal)]
    failed, left = counts[FAILED], counts[SKIPPED]
    result.failure = CheckFailed(
        f"{failed} of {counted(len(jobs), 'line')} failed"
        + (f", and {left} that depend on them were skipped" if left else ""),
        hint=f"fix the errors above, then run the grid again to complete it: {run.line.pasted()}",
        code="jobs_failed",
    )
    return result


def _made(job: Job, ended: Ended, journal: Journal) -> tuple[str, ...]:
    """What a line has left: artifacts, or the document with its results."""
    return ended.outputs or (str(journal.document(job)),)


def _table(bad: list[Job], ended: Mapping[int, Ended], journal: Journal) -> Table:
    """Why lines have failed or were left out, and below it those that failed, each to be pasted."""
    rows = []
    for job in bad:
        one = ended[job.number]
        rows.append([job.checkpoint, job.name, "-" if one.exit is None else str(one.exit), one.why])
    failed = [job for job in bad if ended[job.number].exit is not None]
    notes = ["", f"failed lines, to run one at a time (logs: {journal.logs}):", *(job.line.pasted() for job in failed)]
    return Table(["checkpoint", "job", "exit", "why"], rows, notes=notes)


def _entry(job: Job, ended: Ended, journal: Journal) -> dict[str, Any]:
    """A job as --json has it."""
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
