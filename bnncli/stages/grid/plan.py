"""The lines of a grid: every step of every checkpoint with each of its values, in the order that they wait for each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from bnncli.errors import BnnError, ConfigError
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import CommandLine
from bnncli.options.declaration import made
from bnncli.stages.grid.naming import MAX_NAME, checkpoint_names, line_name, number_text, shortened
from bnncli.stages.grid.steps import CHECKPOINT, JOB, Axes, GridFile, GridStep, filled, references

MAX_JOBS = 10_000
_RESUME = "resume"
_OPTION_FIRST = re.compile("\0([a-z0-9_]+)\0: ")  # of a refusal that is of one option
_COMES_LAST = (
    "evaluate",
    "compare",
    "report",
)  # these read predictions, and draws that they find: what is there must not be chance


@dataclass(frozen=True)
class Job:
    """One line.

    Args:
        number: from 0 on, in an order in which no line waits for a later one.
        checkpoint: as the file has it. called: what tells it from the others, in names.
        name: of the step, with its values and those of the steps that it refers to where there are several.
        axes: which these are.
        after: numbers of the jobs that must have ended well before.
    """

    number: int
    step: GridStep
    checkpoint: str
    called: str
    name: str
    axes: Axes
    line: CommandLine
    after: tuple[int, ...]

    @property
    def label(self) -> str:
        """What tells it from all others, for people."""
        return f"{self.checkpoint}: {self.name}"

    @cached_property
    def given(self) -> dict[str, str]:
        """Options of the line by field, each with the last value that is given."""
        return {name: value for name, value in self.line.parts if name is not None}

    @cached_property
    def key(self) -> str:
        """What tells it from all others and from lines of another day: its words, and where paths begin."""
        return json_sha256({"words": self.line.words(), "folder": str(Path.cwd())})

    @property
    def stem(self) -> str:
        """As a part of a file's name."""
        place = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{self.called}.{self.name}")[:150]
        return f"{place}.{self.key[:8]}"


def plan_jobs(grid: GridFile) -> list[Job]:
    """All lines, each checked as the command line checks it.

    Raises:
        ConfigError: a line that its command refuses, or too many; names the step.
    """
    jobs: list[Job] = []
    values = (one for step in grid.steps for alternatives in step.values.values() for one in alternatives)
    referred = {name for name, _ in references(values)}
    for checkpoint, called in checkpoint_names(grid.checkpoints).items():
        earlier = _Earlier(grid, checkpoint, called, referred, {}, set())
        for step in grid.steps:
            own: list[Job] = []
            for axes, chosen, parts in _branches(step, earlier.jobs):
                if len(jobs) + len(own) == MAX_JOBS:
                    raise ConfigError(
                        f"{grid.path}: expected at most {MAX_JOBS:,} lines; this grid has more", path=grid.path
                    )
                own.append(earlier.job(len(jobs) + len(own), step, axes, chosen=chosen, parts=parts))
            if not own:
                raise grid.fault(step.where, "no lines: the steps that it refers to have no values in common")
            earlier.jobs[step.name] = own
            jobs += own
    return jobs


def _branches(
    step: GridStep, of_steps: Mapping[str, list[Job]]
) -> Iterator[tuple[Axes, dict[str, Any], dict[str, list[Job]]]]:
    """Each choice of a step's own values with each combination of the jobs that these refer to, by what refers to them."""
    for places in product(*(range(len(step.values[option])) for option in step.axes)):
        own = dict(zip(step.axes, places, strict=True))
        chosen = {name: values[own.get(name, 0)] for name, values in step.values.items()}
        for axes, parts in _combinations(references(chosen.values()), of_steps, {}):
            yield {**axes, **{(step.name, option): place for option, place in own.items()}}, chosen, parts


def _combinations(
    referred: Sequence[tuple[str, bool]], of_steps: Mapping[str, list[Job]], axes: Axes
) -> Iterator[tuple[Axes, dict[str, list[Job]]]]:
    """Jobs of the steps that are referred to, as they go together: none is of two values of one option."""
    if not referred:
        yield axes, {}
        return
    (name, is_all), *others = referred
    for more, jobs in _groups(of_steps[name], own=name if is_all else None):
        if _agree(axes, more):
            for whole, parts in _combinations(others, of_steps, {**axes, **more}):
                yield whole, {f"{name}{'*' if is_all else ''}": jobs, **parts}


def _groups(jobs: Iterable[Job], *, own: str | None) -> list[tuple[Axes, list[Job]]]:
    """Jobs of a step by their values; with `own`, those together that differ in values of that step alone."""
    found: dict[tuple[Any, ...], tuple[Axes, list[Job]]] = {}
    for job in jobs:
        axes = {key: place for key, place in job.axes.items() if key[0] != own}
        found.setdefault(tuple(sorted(axes.items())), (axes, []))[1].append(job)
    return list(found.values())


def _agree(one: Axes, other: Axes) -> bool:
    return all(other.get(key, place) == place for key, place in one.items())


@dataclass(frozen=True)
class _Earlier:
    """What there is of one checkpoint when a step's lines are made.

    Args:
        referred: names of the steps that any step refers to: their posteriors have the names that these know.
        jobs: of earlier steps, by these.
        taken: names of lines.
    """

    grid: GridFile
    checkpoint: str
    called: str
    referred: set[str]
    jobs: dict[str, list[Job]]
    taken: set[str]

    def job(
        self, number: int, step: GridStep, axes: Axes, *, chosen: Mapping[str, Any], parts: dict[str, list[Job]]
    ) -> Job:
        """One line of a step, with these values, which refer to these jobs."""
        is_named = step.takes_name and "out" not in chosen
        name = self._name(step, axes, is_named=is_named)
        names = {CHECKPOINT: [self.called], JOB: [f"{self.called}.{name}"]}
        for key, jobs in parts.items():
            names[key] = [self._posterior(step, key, job) for job in jobs]
        line = CommandLine(step.command, step.groups, ((None, self.checkpoint),))
        for option, value in chosen.items():
            said = filled(value, names)
            line = line.having(option, number_text(said) if isinstance(said, float) else said)
        if is_named and (axes or step.is_named or step.name in self.referred):
            line = line.having("name", name)
        after = self._waits(step, axes, parts)
        return Job(number, step, self.checkpoint, self.called, name, axes, self._checked(line, step), after)

    def _name(self, step: GridStep, axes: Axes, *, is_named: bool) -> str:
        """The line's name; where it is none of a result it is shortened, and made another one where it is taken."""
        name = line_name(step, axes, {one.name: one for one in self.grid.steps})
        if is_named:
            if len(name) > MAX_NAME:
                said = f"its values make a name of {len(name)} characters (at most {MAX_NAME}): {name}"
                raise self.grid.fault(step.where, said)
        else:
            first, count = name, 1
            while (name := shortened(first if count == 1 else f"{first}-{count}")) in self.taken:
                count += 1
        self.taken.add(name)
        return name

    def _posterior(self, step: GridStep, key: str, job: Job) -> str:
        """What a reference stands for. Raises ConfigError where that has no name."""
        if not job.step.takes_name or "out" in job.given:
            why = "it sets out" if "out" in job.given else f"{job.step.command} creates no named posterior"
            raise self.grid.fault(step.where, f"{{{key}}} does not stand for a name: {why} (step {job.step.name})")
        return job.name

    def _waits(self, step: GridStep, axes: Axes, parts: Mapping[str, list[Job]]) -> tuple[int, ...]:
        """The jobs that a line waits for: those that it refers to, and others, none of which is of another value than it is itself."""
        if step.after is not None:
            others: Iterable[str] = step.after
        else:
            others = () if parts and step.command not in _COMES_LAST else self.jobs
        waited = {job.number for name in others for job in self.jobs[name] if _agree(axes, job.axes)}
        return tuple(sorted(waited | {job.number for jobs in parts.values() for job in jobs}))

    def _checked(self, line: CommandLine, step: GridStep) -> CommandLine:
        """The line, with --resume where its command takes it beside the others; read as the command line reads it.

        Raises:
            ConfigError: the command refuses it.
        """
        resumed = line.having(_RESUME, True)
        if _RESUME in step.options and _refusal(resumed) is None:
            return resumed
        if (said := _refusal(line)) is not None:
            option = _OPTION_FIRST.match(said)
            is_given = option is not None and option[1] in step.keys
            where, said = (step.keys[option[1]], said[option.end() :]) if option and is_given else (step.where, said)
            raise self.grid.fault(where, f"{said}; in: {line.pasted()}")
        return line


def _refusal(line: CommandLine) -> str | None:
    """What the command line says against a line; None where it takes it."""
    try:
        values = CommandLine.parse(line.command, line.words()[2:], line.groups).values()
        for group in line.groups:
            made(group, values)
    except (BnnError, ValueError, LookupError) as error:
        return error.message if isinstance(error, BnnError) else str(error)
    return None
