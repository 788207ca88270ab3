"""grid: run a pipeline over a grid of settings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import check_writable
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import CheckFailed, UsageError
from bnncli.names import count_noun
from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.session.run import Result, Run, Table

if TYPE_CHECKING:
    from bnncli.commands.grid.running import Line, LineEnd


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
    makefile: bool = option(False, "Print a Makefile that runs these commands, without running them.")
    snakefile: bool = option(
        False, "Print a Snakefile that runs these commands on a cluster with Snakemake, without running them."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.places
        if self.jobs is not None and self.devices is not None:
            raise UsageError("\0jobs\0 and \0devices\0 are mutually exclusive: each GPU runs one job at a time")
        if sum((self.dry_run, self.makefile, self.snakefile)) > 1:
            raise UsageError("\0dry_run\0, \0makefile\0 and \0snakefile\0 print different things: give one of them")

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
        "bnncli grid grid.toml --snakefile > Snakefile",
    ),
    (Argument("file", "The grid, a TOML file."),),
    section="Research",
    place=40,
)


_WAIT = 1.0  # seconds: a grid that was killed just now may hold the lock a moment longer
_HELD = (
    "another bnncli process runs this grid",
    "wait until it ends, or stop it and run this again to continue from there",
)


def execute(run: Run, options: GridOptions) -> Result:
    """Run the lines, or print them with --dry-run, --makefile or --snakefile. The result says how each ended."""
    from bnncli.commands.grid.plan import plan_jobs, read_grid
    from bnncli.commands.grid.running import (
        choose_places,
        find_unfinished,
        place_lines,
        run_lines,
        write_makefile,
        write_snakefile,
    )

    file = Path(run.arguments["file"])
    jobs = plan_jobs(read_grid(file))
    folder = file.with_name(f"{file.name}.grid") if options.dir is None else Path(options.dir)
    lines = place_lines(jobs, folder, run.console.options.config)
    if options.makefile or options.snakefile:
        text = write_makefile(lines) if options.makefile else write_snakefile(lines)
        return Result(lines=text.splitlines(), extra={"lines": [job.line.pasted() for job in jobs], "script": text})
    if options.dry_run:
        ahead = [line.job.line.pasted() for line in find_unfinished(lines)]
        told = f"{count_noun(len(jobs), 'line')}, {len(ahead)} to run"
        return Result(lines=ahead, extra={"lines": ahead}, summary=[told])
    count, environment = choose_places(options, jobs)
    check_writable(folder, hint="choose another place with \0dir\0")
    with artifact_lock(folder / ".lock", wait=_WAIT, poll=run.console.poll, held=_HELD):
        ended = run_lines(run, lines, count, environment)
    return _result(run, lines, ended)


def _result(run: Run, lines: list[Line], ended: list[LineEnd]) -> Result:
    """Return a row for each line that failed or was skipped, or the paths of the results."""
    entries = [_entry(line, end) for line, end in zip(lines, ended, strict=True)]
    counts = Counter(one["state"] for one in entries)
    told = [f"{count} {state.replace('_', ' ')}" for state, count in counts.items()]
    if warned := sum(one["warnings"] > 0 for one in entries):
        told.append(f"{warned} with warnings")
    total = count_noun(len(lines), "line")
    result = Result(
        extra={"jobs": entries, "counts": dict(counts), "dir": str(lines[0].folder)},
        summary=[f"{total}: {', '.join(told)}; logs and documents: {lines[0].folder}"],
    )
    bad = [(line, end) for line, end in zip(lines, ended, strict=True) if not end.is_good]
    if not bad:
        result.lines = list(dict.fromkeys(path for one in entries for path in one["outputs"] or [one["document"]]))
        return result
    failed = [line.job.line.pasted() for line, end in bad if end.state == "failed"]
    rows = [
        [line.job.checkpoint, line.job.name, "-" if end.exit is None else str(end.exit), end.why] for line, end in bad
    ]
    notes = ["", f"failed lines, to run one at a time (logs: {lines[0].folder}):", *failed]
    result.tables = [Table(["checkpoint", "job", "exit", "why"], rows, notes=notes)]
    left = len(bad) - len(failed)
    result.failure = CheckFailed(
        f"{len(failed)} of {total} failed" + (f", and {left} that depend on them were skipped" if left else ""),
        hint=f"fix the errors above, then run the grid again to complete it: {run.line.pasted()}",
        code="jobs_failed",
    )
    return result


def _entry(line: Line, end: LineEnd) -> dict[str, Any]:
    """Return the entry of a line for --json."""
    document = line.document
    log, told = line.path(".log"), line.path(".json")
    return {
        "checkpoint": line.job.checkpoint,
        "name": line.job.name,
        "command": line.job.step.command,
        "line": line.job.line.pasted(),
        "state": end.state,
        "exit": end.exit,
        "seconds": document.get("seconds"),
        "why": end.why,
        "outputs": line.outputs,
        "warnings": len(document.get("warnings", [])),
        "log": str(log) if log.exists() else None,
        "document": str(told) if told.exists() else None,
    }
