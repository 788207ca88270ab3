"""Plan a grid: read its steps and the values of their options, and make a job of each combination."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import BnnError, ConfigError, MissingInput
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import COMPUTE, Command, CommandLine, CommonOptions, InputOptions, NameOptions
from bnncli.options.declaration import (
    CheckedOptions,
    Declared,
    build_options,
    declaration,
    flag_of,
    map_options,
    settings_of,
)
from bnncli.options.toml import base_type, closest, faults_of, line_of, option_value, read_toml

NAMES_ITSELF = ("predict",)  # its results are named after what it predicts with


@dataclass(frozen=True)
class GridStep:
    """One command with the values of its options.

    Args:
        name: name by which other steps refer to it, and prefix of the names of its results.
        is_named: True where the file gives the name.
        values: option field to its alternatives. More than one is an axis.
        after: names of steps to wait for, besides those it refers to; None where the file does not say.
        where: its place in the file, for messages.
        keys: option to its place in the file, for messages.
    """

    name: str
    is_named: bool
    command: str
    groups: tuple[type[CheckedOptions], ...]
    values: Mapping[str, list[Any]]
    after: tuple[str, ...] | None
    where: str
    keys: Mapping[str, str]

    @cached_property
    def options(self) -> Declared:
        """Return every option of the command, by field."""
        return list_options(self.groups)

    @cached_property
    def axes(self) -> list[str]:
        """Return the options with several values."""
        return [name for name, values in self.values.items() if len(values) > 1]

    @property
    def takes_name(self) -> bool:
        """True where --name names its results, which are not named after its inputs."""
        return NameOptions in self.groups and (self.is_named or self.command not in NAMES_ITSELF)


@dataclass(frozen=True)
class GridFile:
    """Contents of a grid file.

    Args:
        where: place of its checkpoints, for messages.
    """

    path: Path
    checkpoints: list[str]
    steps: list[GridStep]
    where: str

    def fault(self, where: str, said: str) -> ConfigError:
        """Return an error about this file."""
        return ConfigError(f"{where}: {said}", path=self.path)


_HEADER = re.compile(r"\s*\[\[\s*[\"']?step[\"']?\s*\]\]")
CHECKPOINT, JOB = "checkpoint", "job"  # what every line may put into its values, beside names of steps
REFERENCE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(\*?)\}")  # so that shards-{000..009}.tar is none
_KEYS = ("command", "name", "after")
_NOT_OF_STEPS = {
    spec.name: "grid controls how and where each line reports; remove this option" for spec in fields(CommonOptions)
} | {
    "force": "a line that continues after a kill must not start over; remove the artifacts that should be created again",
    "dry_run": "it is an option of grid",
    "resume": "grid adds it to lines that can continue",
}


@dataclass(frozen=True)
class _StepReader:
    """Reads one step of the file.

    Args:
        number: number of the step, from one.
        line: line of its [[step]]; None where unknown.
    """

    path: Path
    raw: bytes
    number: int
    line: int | None
    entries: dict[str, Any]

    def where(self, key: str | None = None) -> str:
        """Return the file, line, step and key for messages."""
        at = "" if self.line is None else f":{self.line}"
        if self.line is not None and key in self.entries:
            at = line_of(self.raw, str(key), after=self.line) or at
        command = self.entries.get("command")
        told = f" ({command})" if isinstance(command, str) and key != "command" else ""
        return f"{self.path}{at}: step {self.number}{told}" + (f" {key}" if key is not None else "")

    def fault(self, key: str, said: str) -> ConfigError:
        """Return an error about a key of the step."""
        return ConfigError(f"{self.where(key)}: {said}", path=self.path)

    def step(self, earlier: list[GridStep]) -> GridStep:
        """Read the step, and check that it refers only to earlier ones."""
        command, groups = self._command()
        name, is_named = self._text("name", command.removeprefix("fit-"))
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,79}", name) or name in (CHECKPOINT, JOB):
            expected = f"a letter, then letters, digits, - or _, at most 80 characters, and not {CHECKPOINT} or {JOB}"
            raise self.fault("name", f"expected {expected}; got {name!r}")
        known = [step.name for step in earlier]
        if name in known:
            raise self.fault("name", f"an earlier step is also called {name!r}: rename this one")
        options, values, keys = list_options(groups), {}, {}
        for key, option in self._options(options, command):
            values[option], keys[option] = self._alternatives(options, option, key), self.where(key)
            self._check_references(key, values[option], known, is_many=base_type(options[option][1]) is list)
        after = self._after(known)
        return GridStep(name, is_named, command, groups, values, after, self.where(), keys)

    def _command(self) -> tuple[str, tuple[type[CheckedOptions], ...]]:
        """Return the command, which must work on a checkpoint, and its option classes."""
        name, is_given = self._text("command", "")
        choices = [one for one in registry.names("commands") if _is_for_grids(one)]
        if name not in choices:
            said = f"no command called {name!r} in grids" if is_given else "expected the command of the step; got none"
            raise self.fault("command", f"{said}{closest(name, choices)}")
        command: Command = declaration("commands", name, "COMMAND")
        return name, command.groups

    def _text(self, key: str, default: str) -> tuple[str, bool]:
        value = self.entries.get(key, default)
        if not isinstance(value, str):
            raise self.fault(key, f"expected text; got {_format_value(value)}")
        return value, key in self.entries

    def _options(self, options: Declared, command: str) -> Iterator[tuple[str, str]]:
        """Return each key that is an option, with its field."""
        for key in self.entries:
            if key in _KEYS:
                continue
            name = key.replace("-", "_")
            name = f"{name}_" if f"{name}_" in options else name
            if name not in options:
                choices = [*(flag_of(one)[2:] for one in options if one not in _NOT_OF_STEPS), *_KEYS]
                raise self.fault(key, f"{command} has no such option{closest(key, choices)}")
            if name in _NOT_OF_STEPS:
                raise self.fault(key, f"not an option of a step: {_NOT_OF_STEPS[name]}")
            yield key, name

    def _alternatives(self, options: Declared, name: str, key: str) -> list[Any]:
        """Return the values of an option. For repeatable options a list of lists is needed to sweep."""
        spec, hint = options[name]
        value, is_many = self.entries[key], base_type(hint) is list
        if is_many:
            value = [value] if isinstance(value, str) else value
            is_axis = isinstance(value, list) and any(isinstance(one, list) for one in value)
        else:
            is_axis = isinstance(value, list)
        given = value if is_axis else [value]
        if not given:
            raise self.fault(key, "expected values; got an empty list")
        found: list[Any] = []
        for one in given:
            is_filled = any(REFERENCE.search(text) for text in list_texts(one))
            taken = one
            if not is_filled or base_type(hint) not in (list, str):
                with faults_of(self.path):
                    taken = option_value(spec, hint, one, self.where(key))
            if taken in found:
                raise self.fault(key, f"{one!r} is given twice")
            found.append(taken)
        return found

    def _check_references(self, key: str, values: list[Any], known: list[str], *, is_many: bool) -> None:
        """Raise ConfigError where a value refers to no earlier step, or to several results where one is needed."""
        for name, _ in find_references(values):
            if name not in known:
                raise self.fault(key, self._unknown(name, known))
        for text in (text for value in values for text in list_texts(value)):
            starred = [one[1] for one in REFERENCE.finditer(text) if one[2]]
            if not set(starred).isdisjoint((CHECKPOINT, JOB)):
                raise self.fault(
                    key, f"{{{CHECKPOINT}}} and {{{JOB}}} stand for one word each: omit the star in {text!r}"
                )
            if starred and not is_many:
                raise self.fault(key, f"it takes one value, but {{{starred[0]}*}} stands for several: omit the star")
            if len(starred) > 1:
                raise self.fault(key, f"expected at most one {{STEP*}} in a text; got {text!r}")

    def _after(self, known: list[str]) -> tuple[str, ...] | None:
        """Return the steps that `after` names."""
        given = self.entries.get("after")
        waits = [given] if isinstance(given, str) else given
        if waits is None:
            return None
        if not isinstance(waits, list) or not all(isinstance(one, str) for one in waits):
            raise self.fault("after", f"expected names of steps; got {_format_value(given)}")
        for one in waits:
            if one not in known:
                raise self.fault("after", self._unknown(one, known))
        return tuple(waits)

    def _unknown(self, name: str, known: list[str]) -> str:
        return f"no earlier step is called {name!r}" + (closest(name, known) if known else "; this is the first step")


def read_grid(path: Path) -> GridFile:
    """Read the file and check each step on its own.

    Raises:
        MissingInput: the file or a checkpoint does not exist.
        ConfigError: not TOML, or an invalid key, command, option or value; with its line.
    """
    raw, tables = read_toml(path, what="the grid ")
    for key in tables:
        if key not in ("checkpoints", "step"):
            said = f"unknown key {key!r}{closest(key, ['checkpoints', 'step'])}"
            raise ConfigError(f"{path}{line_of(raw, key)}: {said}", path=path)
    steps = tables.get("step")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        said = f"expected steps, each as [[step]] with a command; got {_format_value(steps)}"
        raise ConfigError(f"{path}: {said}", path=path)
    lines = [number for number, line in enumerate(raw.decode("utf-8-sig").split("\n"), 1) if _HEADER.match(line)]
    begins = lines if len(lines) == len(steps) else [None] * len(steps)
    found: list[GridStep] = []
    for number, entries in enumerate(steps, start=1):
        found.append(_StepReader(path, raw, number, begins[number - 1], entries).step(found))
    where = f"{path}{line_of(raw, 'checkpoints')}: checkpoints"
    return GridFile(path, _checkpoints(path, where, tables.get("checkpoints"), found[0]), found, where)


def list_options(groups: tuple[type[CheckedOptions], ...]) -> Declared:
    """Return every option of some classes, by field."""
    return {name: spec for group in groups for name, spec in map_options(group).items()}


_NOT_IN_GRIDS = ("clean", "rm")  # they remove what other lines go on from


def _is_for_grids(name: str) -> bool:
    """True where a command works on one checkpoint."""
    command = declaration("commands", name, "COMMAND")
    if not isinstance(command, Command) or name in ("grid", *_NOT_IN_GRIDS):
        return False
    return [argument.name for argument in command.arguments] == ["ckpt"]


def _checkpoints(path: Path, where: str, given: Any, first: GridStep) -> list[str]:
    """Return the checkpoints that the file names, without repeats; those of a pattern sorted by name."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigError(f"{where}: expected checkpoint paths or patterns; got {_format_value(given)}", path=path)
    found: dict[str, str] = {}
    for pattern in patterns:
        names = [pattern]
        if glob.has_magic(pattern) and not Path(pattern).exists():
            names = sorted(one for one in glob.glob(pattern, recursive=True) if not one.endswith(".bnn"))
            if not names:
                raise MissingInput(f"{where}: no file matches {pattern!r}", path=pattern)
        elif not _is_there(pattern, first):
            hint = "paths are relative to where grid runs; name a run without a checkpoint as extract-features named it"
            raise MissingInput(f"{where}: {pattern} does not exist", hint=hint, path=pattern)
        for name in names:
            found.setdefault(os.path.abspath(name), name)
    return list(found.values())


def _format_value(value: Any) -> str:
    return "none" if value is None else repr(value)[:80]


_MAKES_ITS_CHECKPOINT = ("train", "extract-features")


def _is_there(name: str, first: GridStep) -> bool:
    """True where a checkpoint or a run of this name exists, or the first step makes it."""
    if "run_dir" in first.values or first.command in _MAKES_ITS_CHECKPOINT or Path(name).exists():
        return True
    return RunFolder.of(Path(name), None, is_name=True).root.is_dir()


Axes = Mapping[tuple[str, str], int]  # which value of an option of a step, by both names


@dataclass(frozen=True)
class Job:
    """One command line of the grid.

    Args:
        number: number from 0 on. No line waits for a later one.
        checkpoint: checkpoint as in the file. called: its name in names of jobs.
        name: name of the step, with those of its values and of the steps it refers to that vary.
        axes: these values.
        after: numbers of the jobs that must have succeeded before.
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
        """Return a unique label for people."""
        return f"{self.checkpoint}: {self.name}"

    @cached_property
    def given(self) -> dict[str, str]:
        """Return the options of the line by field, each with its last value."""
        return {name: value for name, value in self.line.parts if name is not None}

    @cached_property
    def key(self) -> str:
        """Return a key that identifies the line across runs: its words and the folder that paths start from."""
        return json_sha256({"words": self.line.words(), "folder": str(Path.cwd())})

    @property
    def stem(self) -> str:
        """Return the job's name for file names."""
        place = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{self.called}.{self.name}")[:150]
        return f"{place}.{self.key[:8]}"


MAX_JOBS = 10_000
MAX_NAME = 100  # letters, as of an artifact's
_RESUME = "resume"
_OPTION_FIRST = re.compile("\0([a-z0-9_]+)\0: ")  # of a refusal that is of one option
# These read predictions, and draws that they find: what is there must not be chance.
_COMES_LAST = ("evaluate", "compare", "report")


@dataclass(frozen=True)
class _Earlier:
    """Artifacts that exist for one checkpoint when the lines of a step are planned.

    Args:
        referred: names of the steps that any step refers to, whose posteriors must have known names.
        jobs: earlier step to its jobs.
        taken: names of lines that are in use.
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
        """Return the job of a step with these values, which refer to these jobs."""
        is_named = step.takes_name and "out" not in chosen
        name = self._name(step, axes, is_named=is_named)
        names = {CHECKPOINT: [self.called], JOB: [f"{self.called}.{name}"]}
        for key, jobs in parts.items():
            names[key] = [self._posterior(step, key, job) for job in jobs]
        line = CommandLine(step.command, step.groups, ((None, self.checkpoint),))
        for option, value in chosen.items():
            said = fill_references(value, names)
            line = line.having(option, format_number(said) if isinstance(said, float) else said)
        if is_named and (axes or step.is_named or step.name in self.referred):
            line = line.having("name", name)
        after = self._waits(step, axes, parts)
        return Job(number, step, self.checkpoint, self.called, name, axes, self._checked(line, step), after)

    def _name(self, step: GridStep, axes: Axes, *, is_named: bool) -> str:
        """Return the line's name. Where it does not name a result, shorten it and make it unique."""
        name = name_line(step, axes, {one.name: one for one in self.grid.steps})
        if is_named:
            if len(name) > MAX_NAME:
                said = f"its values make a name of {len(name)} characters (at most {MAX_NAME}): {name}"
                raise self.grid.fault(step.where, said)
        else:
            first, count = name, 1
            while (name := shorten_name(first if count == 1 else f"{first}-{count}")) in self.taken:
                count += 1
        self.taken.add(name)
        return name

    def _posterior(self, step: GridStep, key: str, job: Job) -> str:
        """Return the posterior of a reference. Raises ConfigError where it has no name."""
        if not job.step.takes_name or "out" in job.given:
            why = "it sets out" if "out" in job.given else f"{job.step.command} creates no named posterior"
            raise self.grid.fault(step.where, f"{{{key}}} does not stand for a name: {why} (step {job.step.name})")
        return job.name

    def _waits(self, step: GridStep, axes: Axes, parts: Mapping[str, list[Job]]) -> tuple[int, ...]:
        """Return the jobs to wait for: those the line refers to, and those of other steps that share its values."""
        if step.after is not None:
            others: Iterable[str] = step.after
        else:
            others = () if parts and step.command not in _COMES_LAST else self.jobs
        waited = {job.number for name in others for job in self.jobs[name] if _is_compatible(axes, job.axes)}
        return tuple(sorted(waited | {job.number for jobs in parts.values() for job in jobs}))

    def _checked(self, line: CommandLine, step: GridStep) -> CommandLine:
        """Check the line as the command line does, and add --resume where its command takes it.

        Raises:
            ConfigError: the command refuses the line.
        """
        if {"\n", "\r"} & {*line.pasted()}:
            raise self.grid.fault(step.where, "expected values without line breaks")
        resumed = line.having(_RESUME, True)
        if _RESUME in step.options and _find_refusal(resumed) is None:
            return resumed
        if (said := _find_refusal(line)) is not None:
            option = _OPTION_FIRST.match(said)
            is_given = option is not None and option[1] in step.keys
            where, said = (step.keys[option[1]], said[option.end() :]) if option and is_given else (step.where, said)
            raise self.grid.fault(where, f"{said}; in: {line.pasted()}")
        return line


def plan_jobs(grid: GridFile) -> list[Job]:
    """Return all jobs, each checked as the command line checks it.

    Raises:
        ConfigError: a command refuses its line, two lines write the same, or there are too many lines. The message names
            the step.
    """
    jobs: list[Job] = []
    values = (one for step in grid.steps for alternatives in step.values.values() for one in alternatives)
    referred = {name for name, _ in find_references(values)}
    for checkpoint, called in checkpoint_names(grid.checkpoints).items():
        earlier = _Earlier(grid, checkpoint, called, referred, {}, set())
        for step in grid.steps:
            own: list[Job] = []
            for axes, chosen, parts in _branches(step, earlier.jobs):
                if len(jobs) + len(own) == MAX_JOBS:
                    raise grid.fault(str(grid.path), f"expected at most {MAX_JOBS:,} lines; this grid has more")
                own.append(earlier.job(len(jobs) + len(own), step, axes, chosen=chosen, parts=parts))
            if not own:
                raise grid.fault(step.where, "no lines: the steps that it refers to have no values in common")
            earlier.jobs[step.name] = own
            jobs += own
    _check_apart(grid, jobs)
    return jobs


def checkpoint_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """Return names for the checkpoints in file names: the file's name, or the whole path where two share it."""
    stems = Counter(Path(one).stem for one in checkpoints)
    found: dict[str, str] = {}
    for one in checkpoints:
        name, path = Path(one).stem, os.path.normpath(one)
        if stems[name] > 1:
            name = re.sub(r"[/\\]+", "-", path).strip("-.")
        if name in found.values():
            name = f"{name}-{json_sha256(path)[:8]}"
        found[one] = name
    return found


def fill_references(value: Any, names: Mapping[str, list[str]]) -> Any:
    """Replace the references in a value. In a list, a text is repeated for each of several results.

    Args:
        names: reference, with its star if it has one, to names.
    """
    if not isinstance(value, list):
        return _fill_text(value, names)[0] if isinstance(value, str) else value
    return [one for item in value for one in (_fill_text(item, names) if isinstance(item, str) else [item])]


def _fill_text(text: str, names: Mapping[str, list[str]]) -> list[str]:
    several = next((one[0][1:-1] for one in REFERENCE.finditer(text) if one[2]), None)
    first = {key: known[0] for key, known in names.items()}
    rounds = [{}] if several is None else [{several: chosen} for chosen in names[several]]
    return [_replace_references(text, first | chosen) for chosen in rounds]


def _replace_references(text: str, names: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda one: names[one[0][1:-1]], text)


def name_line(step: GridStep, axes: Axes, steps: Mapping[str, GridStep]) -> str:
    """Return the step's name with each value that varies, those of the steps it refers to first."""
    words = [
        step.name,
        *(_format_word(option, steps[of].values[option][place]) for (of, option), place in axes.items()),
    ]
    return "-".join(words)


def _format_word(option: str, value: Any) -> str:
    """Format a value in a name: a plain word unchanged, anything else after the option."""
    flag = flag_of(option)[2:]
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    text = "+".join(value) if isinstance(value, list) else format_number(value)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text):
        return text
    return flag + re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"(?<=\d)\.(?=\d)", "p", text)).strip("-")


def format_number(value: Any) -> str:
    """Format a number as its shortest exact text; anything else unchanged."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def shorten_name(name: str) -> str:
    """Cut a name to MAX_NAME characters, with a digest at the end of a long one."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{json_sha256(name)[:8]}"


def _find_refusal(line: CommandLine) -> str | None:
    """Return the command line's error for a line; None where it accepts it."""
    try:
        values = CommandLine.parse(line.command, line.words()[2:], line.groups).values()
        for group in line.groups:
            build_options(group, values)
    except (BnnError, ValueError, LookupError) as error:
        return error.message if isinstance(error, BnnError) else str(error)
    return None


def _branches(
    step: GridStep, of_steps: Mapping[str, list[Job]]
) -> Iterator[tuple[Axes, dict[str, Any], dict[str, list[Job]]]]:
    """Yield each choice of a step's own values with each combination of the jobs they refer to."""
    for places in product(*(range(len(step.values[option])) for option in step.axes)):
        own = dict(zip(step.axes, places, strict=True))
        chosen = {name: values[own.get(name, 0)] for name, values in step.values.items()}
        for axes, parts in _combinations(find_references(chosen.values()), of_steps, {}):
            yield {**axes, **{(step.name, option): place for option, place in own.items()}}, chosen, parts


def _combinations(
    referred: Sequence[tuple[str, bool]], of_steps: Mapping[str, list[Job]], axes: Axes
) -> Iterator[tuple[Axes, dict[str, list[Job]]]]:
    """Return the compatible combinations of jobs of the steps referred to: none has two values of one option."""
    if not referred:
        yield axes, {}
        return
    (name, is_all), *others = referred
    for more, jobs in _groups(of_steps[name], own=name if is_all else None):
        if _is_compatible(axes, more):
            for whole, parts in _combinations(others, of_steps, {**axes, **more}):
                yield whole, {f"{name}{'*' if is_all else ''}": jobs, **parts}


def _groups(jobs: Iterable[Job], *, own: str | None) -> list[tuple[Axes, list[Job]]]:
    """Group a step's jobs by their values; with `own`, jobs that differ only in that step's own values are in one group."""
    found: dict[tuple[Any, ...], tuple[Axes, list[Job]]] = {}
    for job in jobs:
        axes = {key: place for key, place in job.axes.items() if key[0] != own}
        found.setdefault(tuple(sorted(axes.items())), (axes, []))[1].append(job)
    return list(found.values())


def _is_compatible(one: Axes, other: Axes) -> bool:
    return all(other.get(key, place) == place for key, place in one.items())


def find_references(values: Iterable[Any]) -> list[tuple[str, bool]]:
    """Return the steps that these values refer to, and whether each reference takes all of the step's own axes."""
    found = (one for value in values for text in list_texts(value) for one in REFERENCE.finditer(text))
    pairs = dict.fromkeys((one[1], bool(one[2])) for one in found)
    return [pair for pair in pairs if pair[0] not in (CHECKPOINT, JOB)]


def list_texts(value: Any) -> list[str]:
    """Return the texts of a value, which may have references."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


WRITTEN = ("plot", "table", "dense", "out")  # options of a file or folder, which no two lines may share


def _check_apart(grid: GridFile, jobs: list[Job]) -> None:
    """Pass where no two lines write the same. Raises ConfigError otherwise, naming the step."""
    folders: dict[str, Job] = {}
    lines: dict[str, Job] = {}
    results: dict[tuple[object, ...], Job] = {}
    files: dict[str, Job] = {}
    for job in jobs:
        folder = find_run_folder(job)
        other = folders.setdefault(str(folder), job)
        if os.path.abspath(other.checkpoint) != os.path.abspath(job.checkpoint):
            said = f"{other.checkpoint} and {job.checkpoint} would share the run folder {folder}: put {{checkpoint}} into run-dir"
            raise grid.fault(job.step.keys.get("run_dir", job.step.where), said)
        if (other := lines.setdefault(job.key, job)) is not job:
            raise grid.fault(job.step.where, f"step {other.step.name} has the same line: {job.line.pasted()}")
        for key, name in _results(job):
            other = results.setdefault((str(folder), *key), job)
            if other is not job and (name or _list_differences(job, other)):
                raise grid.fault(job.step.where, _describe_clash(job, other, name))
        for option in WRITTEN:
            path = Path(job.given.get(option, ""))
            if option in job.given and files.setdefault(os.path.abspath(path), job) is not job:
                instead = path.with_name(f"{path.stem}-{{{JOB}}}{path.suffix}")
                said = f"several lines would write {path}: put {{{JOB}}} into the name, such as {instead}"
                raise grid.fault(job.step.keys.get(option, f"{job.step.where} {flag_of(option)[2:]}"), said)


def find_run_folder(job: Job) -> Path:
    """Return the folder of the job's run, as far as its line says."""
    return Path(os.path.abspath(RunFolder.of(Path(job.checkpoint), job.given.get("run_dir"), is_name=True).root))


# Of commands whose results are not named by --name: the options that say what is written.
_CHOOSING = {
    "train": (),
    "extract-features": ("data", "ood", "hold_out", "from_npz"),
    "predict": ("posterior", "integrator", "layers", "split"),
    "evaluate": ("posterior", "integrator", "layers"),
}


def _results(job: Job) -> Iterator[tuple[tuple[object, ...], str]]:
    """Return what tells the job's results from others', and their names."""
    command = job.step.command
    if "name" in job.given or (job.step.takes_name and "out" not in job.given):
        name = job.given.get("name", job.name)
        yield ("predictions" if command == "predict" else "posterior", name), name
    elif command in _CHOOSING and "out" not in job.given:
        yield (command, *(list_values(job, _list_choosing_options(command)))), ""


def _describe_clash(job: Job, other: Job, name: str) -> str:
    """Describe what two lines would both write, and what helps."""
    if name and job.step is other.step:
        return f"two of its lines create {name!r}: drop a value, or put it in a step with another name"
    if name:
        return f"step {other.step.name} also creates {name!r}: rename one of them"
    shown = " and ".join(flag_of(one)[2:] for one in _list_differences(job, other))
    said = f"lines with different values of {shown} would write the same files"
    if job.step.command == "predict":
        return f"{said}: give the step a name, so that its predictions are named after their values"
    if job.step.command == "train":
        return f"{said} (the checkpoint itself): keep one value, and use a grid with other checkpoints for another"
    return f"{said}: keep one value, or give each its own run folder with run-dir"


_SHARED = {spec.name for group in (*COMPUTE, NameOptions, InputOptions) for spec in fields(group)} - {"seed"}


def _list_differences(job: Job, other: Job) -> list[str]:
    """Options in which two lines of a command differ that change the numbers of what is written there."""
    options, chosen = job.step.options, _list_choosing_options(job.step.command)
    names = {name for name in options if name not in chosen | _SHARED and options[name][0].metadata["numeric"]}
    return sorted(name for name in names if list_values(job, (name,)) != list_values(other, (name,)))


def _list_choosing_options(command: str) -> set[str]:
    return {*_CHOOSING[command], *(settings_of("integrators") if command == "predict" else ())}


def list_values(job: Job, names: Iterable[str]) -> list[tuple[str, str]]:
    """These options of a line with their values, in an order of their own."""
    return sorted((name, value) for name, value in job.line.parts if name is not None and name in names)
