"""Lines of a grid that would write the same: told before anything runs, not when the second one finds what the first has left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import ConfigError
from bnncli.options.command import COMPUTE, InputOptions, NameOptions
from bnncli.options.declaration import flag_of, settings_of
from bnncli.stages.grid.plan import Job
from bnncli.stages.grid.steps import JOB, GridFile

WRITTEN = ("plot", "table", "dense", "out")  # options of a file or folder, which no two lines may share
# Of commands whose results are not named by --name: the options that say what is written.
_CHOOSING = {
    "train": (),
    "extract-features": ("data", "ood", "hold_out", "from_npz"),
    "predict": ("posterior", "integrator", "layers", "split"),
    "evaluate": ("posterior", "integrator", "layers"),
}
_SHARED = {spec.name for group in (*COMPUTE, NameOptions, InputOptions) for spec in fields(group)} - {"seed"}


def check_apart(grid: GridFile, jobs: list[Job]) -> None:
    """Pass where no two lines write the same. Raises ConfigError otherwise, naming the step."""
    folders: dict[str, Job] = {}
    lines: dict[str, Job] = {}
    results: dict[tuple[object, ...], Job] = {}
    files: dict[str, Job] = {}
    for job in jobs:
        folder = run_folder_of(job)
        other = folders.setdefault(str(folder), job)
        if os.path.abspath(other.checkpoint) != os.path.abspath(job.checkpoint):
            said = f"{other.checkpoint} and {job.checkpoint} would share the run folder {folder}: put {{checkpoint}} into run-dir"
            raise grid.fault(job.step.keys.get("run_dir", job.step.where), said)
        if (other := lines.setdefault(job.key, job)) is not job:
            raise grid.fault(job.step.where, f"step {other.step.name} has the same line: {job.line.pasted()}")
        for key, said in _results(job):
            if (other := results.setdefault((str(folder), *key), job)) is not job and not _is_same(job, other):
                raise grid.fault(job.step.where, _clash(job, other, said))
        for path, option in _written(job):
            if (other := files.setdefault(path, job)) is not job:
                raise _shared_file(grid, job, option)


def run_folder_of(job: Job) -> Path:
    """Where the job's run lies, as far as its line says."""
    return Path(os.path.abspath(RunFolder.of(Path(job.checkpoint), job.given.get("run_dir"), is_name=True).root))


def _results(job: Job) -> Iterator[tuple[tuple[object, ...], str]]:
    """What tells the job's results from others', and what they are called."""
    command = job.step.command
    if "name" in job.given or (job.step.takes_name and "out" not in job.given):
        name = job.given.get("name", job.name)
        yield ("predictions" if command == "predict" else "posterior", name), name
    elif command in _CHOOSING and "out" not in job.given:
        yield (command, *(values_of(job, _choosing(command)))), ""


def _choosing(command: str) -> set[str]:
    return {*_CHOOSING[command], *(settings_of("integrators") if command == "predict" else ())}


def values_of(job: Job, names: Iterable[str]) -> list[tuple[str, str]]:
    """These options of a line with their values, in an order of their own."""
    return sorted((name, value) for name, value in job.line.parts if name is not None and name in names)


def _is_same(job: Job, other: Job) -> bool:
    """Whether two unnamed results of one place are the same, as their lines differ in nothing that changes numbers."""
    return not job.step.takes_name and not _differing(job, other)


def _differing(job: Job, other: Job) -> list[str]:
    """Options in which two lines of a command differ that change the numbers of what is written there."""
    options, chosen = job.step.options, _choosing(job.step.command)
    names = {name for name in options if name not in chosen | _SHARED and options[name][0].metadata["numeric"]}
    return sorted(name for name in names if values_of(job, (name,)) != values_of(other, (name,)))


def _clash(job: Job, other: Job, name: str) -> str:
    """What two lines would both write, and what helps."""
    if name and job.step is other.step:
        return f"two of its lines create {name!r}: drop a value, or put it in a step with another name"
    if name:
        return f"step {other.step.name} also creates {name!r}: rename one of them"
    shown = " and ".join(flag_of(one)[2:] for one in _differing(job, other))
    said = f"lines with different values of {shown} would write the same files"
    if job.step.command == "predict":
        return f"{said}: give the step a name, so that its predictions are named after their values"
    if job.step.command == "train":
        return f"{said} (the checkpoint itself): keep one value, and use a grid with other checkpoints for another"
    return f"{said}: keep one value, or give each its own run folder with run-dir"


def _written(job: Job) -> Iterator[tuple[str, str]]:
    """Files and folders that the line names to be written, each with its option."""
    for option in WRITTEN:
        if option in job.given:
            yield os.path.abspath(job.given[option]), option


def _shared_file(grid: GridFile, job: Job, option: str) -> ConfigError:
    flag, path = flag_of(option)[2:], Path(job.given[option])
    instead = path.with_name(f"{path.stem}-{{{JOB}}}{path.suffix}")
    said = f"several lines would write {path}: put {{{JOB}}} into the name, such as {instead}"
    return grid.fault(job.step.keys.get(option, f"{job.step.where} {flag}"), said)
