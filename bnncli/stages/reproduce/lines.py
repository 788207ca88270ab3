"""Lines of a study run in this process, one after the other; each leaves the document that it would print."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.artifacts.atomic import publish_bytes
from bnncli.errors import BnnError, Interrupted, ReadError, WriteError
from bnncli.options.command import (
    CommandLine,
    CommonOptions,
    ComputeOptions,
    InputOptions,
    LockOptions,
    NameOptions,
    RecordOptions,
    RunOptions,
    WriteOptions,
)
from bnncli.options.declaration import declaration, made, spelled
from bnncli.session.run import Run
from bnncli.stages.grid.plan import Job
from bnncli.stages.grid.steps import options_of
from bnncli.stages.reproduce.aside import Aside
from bnncli.system.input_files import read_object

_WAIT = 60.0  # seconds for a lock: processes of a reproduction that was killed may still be saving their states
_OF_RUNS = {
    RunOptions: "run_options",
    WriteOptions: "write",
    ComputeOptions: "compute",
    NameOptions: "naming",
    LockOptions: "lock",
    InputOptions: "inputs",
    RecordOptions: "record",
}


@dataclass(frozen=True)
class Done:
    """A line that ended.

    Args:
        line: as it can be typed again.
        document: its metrics and results; None where it failed, or was left out.
        why: it was. None where it ended well.
    """

    line: str
    document: dict[str, Any] | None
    seconds: float
    warnings: tuple[str, ...]
    why: str | None

    def to_json(self) -> dict[str, Any]:
        """As results have it."""
        return {"line": self.line, "warnings": list(self.warnings), "failed": self.why}


def run_lines(run: Run, jobs: list[Job], folder: Path, *, what: str, force: bool = False) -> dict[int, Done]:
    """How each job ended, by number; what waits for one that failed is left out.

    Args:
        folder: of the documents. what: the name of the progress. force: make anew what is there.

    Raises:
        Interrupted: a signal has come.
    """
    task = run.console.task(what, len(jobs))
    ended: dict[int, Done] = {}
    for job in jobs:
        failed = next((number for number in job.after if ended[number].why is not None), None)
        if failed is not None:
            said = f"it needs {jobs[failed].name}, which failed: {ended[failed].why}"
            ended[job.number] = Done(job.line.pasted(), None, 0.0, (), said)
        else:
            ended[job.number] = _run_line(run, job, folder / f"{job.stem}.json", force=force)
        task.advance(note=job.name[:60])
    return ended


def _run_line(run: Run, job: Job, target: Path, *, force: bool) -> Done:
    line = _with_compute(job.line, run.compute)
    aside, start = Aside(run.console), time.monotonic()
    try:
        result = _stage(run, line, job, aside, force=force)
        said = {"metrics": result.metrics, **result.extra} if result.metrics else result.extra
        document = json.loads(json.dumps(spelled(said), allow_nan=False))
        if result.action == "up_to_date" and target.is_file():  # what it printed when it was made says more
            document = {**read_object(target), **document}
        publish_bytes(target, json.dumps(document).encode(), may_replace=True)
        why = None
    except (Interrupted, ReadError, WriteError):
        raise
    except BnnError as error:
        document, why = None, str(spelled(error.message + error.advice))
    return Done(line.pasted(), document, round(time.monotonic() - start, 3), tuple(aside.warnings), why)


def _stage(run: Run, line: CommandLine, job: Job, aside: Aside, *, force: bool) -> Any:
    """The result of the line's stage, as the command line would have it run; --force is no part of what it records."""
    values = line.values() | ({"force": True} if force else {})
    options = {group: made(group, values) for group in line.groups}
    own = next((one for group, one in options.items() if group not in (*_OF_RUNS, CommonOptions)), None)
    parts: dict[str, Any] = {name: options.get(group, group()) for group, name in _OF_RUNS.items()}
    parts["lock"] = replace(parts["lock"], wait=max(parts["lock"].wait, _WAIT))
    argument = declaration("stages", line.command, "COMMAND").arguments[0]
    arguments = {argument.name: [Path(job.checkpoint)] if argument.is_many else Path(job.checkpoint)}
    step = replace(
        run,
        command=line.command,
        line=line,
        arguments=arguments,
        console=aside,
        started=time.monotonic(),
        heads={},
        followed={},
        is_named=False,
        has_device=False,
        **parts,
    )
    return registry.load_module("stages", line.command).run(step, own)


def _with_compute(line: CommandLine, compute: ComputeOptions) -> CommandLine:
    """The line with seed, device and threads of the command, where it takes them and says none itself."""
    taken = options_of(line.groups)
    for name, value in compute.given().items():
        if name in taken and not line.gives(name):
            line = line.having(name, value)
    return line
