"""The plan of a grid: steps with the values of their options, their names, where each runs."""

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
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import BnnError, ConfigError, DeviceError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import Command, CommandLine, CommonOptions, NameOptions, RecordOptions
from bnncli.options.declaration import Checked, Declared, declaration, declared, flag_of, made
from bnncli.options.toml import base_type, closest, faults_of, line_of, option_value, read_toml
from bnncli.system import workers as team
from bnncli.system.devices import device_name

if TYPE_CHECKING:
    from bnncli.commands.grid import GridOptions


NAMES_ITSELF = ("predict",)  # its results are named after what it predicts with


@dataclass(frozen=True)
class GridStep:
    """One command with its options.

    Args:
        name: by which other steps refer to it, and with which the names of its results begin.
        is_named: whether the file says the name.
        values: of options by field: what each may be. More than one is an axis.
        after: names of steps that it waits for, beside those that it refers to; None where the file does not say.
        where: it stands, for messages.
        keys: where each option stands, for messages.
    """

    name: str
    is_named: bool
    command: str
    groups: tuple[type[Checked], ...]
    values: Mapping[str, list[Any]]
    after: tuple[str, ...] | None
    where: str
    keys: Mapping[str, str]

    @cached_property
    def options(self) -> Declared:
        """Every option of the command, by field."""
        return options_of(self.groups)

    @cached_property
    def axes(self) -> list[str]:
        """Options with several values."""
        return [name for name, values in self.values.items() if len(values) > 1]

    @property
    def takes_name(self) -> bool:
        """Whether --name says where its results go, and they are not named after what it works on."""
        return NameOptions in self.groups and (self.is_named or self.command not in NAMES_ITSELF)

    @property
    def makes_artifacts(self) -> bool:
        """Whether its lines tell themselves what is up to date."""
        return RecordOptions in self.groups


@dataclass(frozen=True)
class GridFile:
    """What a file asks for.

    Args:
        where: its checkpoints stand, for messages.
    """

    path: Path
    checkpoints: list[str]
    steps: list[GridStep]
    where: str

    def fault(self, where: str, said: str) -> ConfigError:
        """The error for something in this file."""
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
    """One step as it stands in the file.

    Args:
        number: from one.
        line: of its [[step]]; None where that cannot be told.
    """

    path: Path
    raw: bytes
    number: int
    line: int | None
    entries: dict[str, Any]

    def where(self, key: str | None = None) -> str:
        """For messages: the file, the line, the step and the key."""
        at = "" if self.line is None else f":{self.line}"
        if self.line is not None and key in self.entries:
            at = line_of(self.raw, str(key), after=self.line) or at
        command = self.entries.get("command")
        told = f" ({command})" if isinstance(command, str) and key != "command" else ""
        return f"{self.path}{at}: step {self.number}{told}" + (f" {key}" if key is not None else "")

    def fault(self, key: str, said: str) -> ConfigError:
        """The error for a key of the step."""
        return ConfigError(f"{self.where(key)}: {said}", path=self.path)

    def step(self, earlier: list[GridStep]) -> GridStep:
        """The step, once it is known that it refers to earlier ones only."""
        command, groups = self._command()
        name, is_named = self._text("name", command.removeprefix("fit-"))
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,79}", name) or name in (CHECKPOINT, JOB):
            expected = f"a letter, then letters, digits, - or _, at most 80 characters, and not {CHECKPOINT} or {JOB}"
            raise self.fault("name", f"expected {expected}; got {name!r}")
        known = [step.name for step in earlier]
        if name in known:
            raise self.fault("name", f"an earlier step is also called {name!r}: rename this one")
        options, values, keys = options_of(groups), {}, {}
        for key, option in self._options(options, command):
            values[option], keys[option] = self._alternatives(options, option, key), self.where(key)
            self._check_references(key, values[option], known, is_many=base_type(options[option][1]) is list)
        after = self._after(known)
        return GridStep(name, is_named, command, groups, values, after, self.where(), keys)

    def _command(self) -> tuple[str, tuple[type[Checked], ...]]:
        """The command, which works on a checkpoint, and its classes of options."""
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
            raise self.fault(key, f"expected text; got {_shown(value)}")
        return value, key in self.entries

    def _options(self, options: Declared, command: str) -> Iterator[tuple[str, str]]:
        """Each key that is an option, and the option's field."""
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
        """The values of an option: of a list each; of an option that is given several times, each list of a list of lists."""
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
            is_filled = any(REFERENCE.search(text) for text in texts(one))
            taken = one
            if not is_filled or base_type(hint) not in (list, str):
                with faults_of(self.path):
                    taken = option_value(spec, hint, one, self.where(key))
            if taken in found:
                raise self.fault(key, f"{one!r} is given twice")
            found.append(taken)
        return found

    def _check_references(self, key: str, values: list[Any], known: list[str], *, is_many: bool) -> None:
        """Raise ConfigError where a value refers to no earlier step, or to several results where there is room for one."""
        for name, _ in references(values):
            if name not in known:
                raise self.fault(key, self._unknown(name, known))
        for text in (text for value in values for text in texts(value)):
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
        """The steps that this one is told to wait for."""
        given = self.entries.get("after")
        waits = [given] if isinstance(given, str) else given
        if waits is None:
            return None
        if not isinstance(waits, list) or not all(isinstance(one, str) for one in waits):
            raise self.fault("after", f"expected names of steps; got {_shown(given)}")
        for one in waits:
            if one not in known:
                raise self.fault("after", self._unknown(one, known))
        return tuple(waits)

    def _unknown(self, name: str, known: list[str]) -> str:
        return f"no earlier step is called {name!r}" + (closest(name, known) if known else "; this is the first step")


def read_grid(path: Path) -> GridFile:
    """The file, checked as far as each step can be alone.

    Raises:
        MissingInput: it is not there, or a checkpoint is not.
        ConfigError: it is no TOML; a key, command, option or value that is none, with its line.
    """
    raw, tables = read_toml(path, what="the grid ")
    for key in tables:
        if key not in ("checkpoints", "step"):
            said = f"unknown key {key!r}{closest(key, ['checkpoints', 'step'])}"
            raise ConfigError(f"{path}{line_of(raw, key)}: {said}", path=path)
    steps = tables.get("step")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        said = f"expected steps, each as [[step]] with a command; got {_shown(steps)}"
        raise ConfigError(f"{path}: {said}", path=path)
    lines = [number for number, line in enumerate(raw.decode("utf-8-sig").split("\n"), 1) if _HEADER.match(line)]
    begins = lines if len(lines) == len(steps) else [None] * len(steps)
    found: list[GridStep] = []
    for number, entries in enumerate(steps, start=1):
        found.append(_StepReader(path, raw, number, begins[number - 1], entries).step(found))
    where = f"{path}{line_of(raw, 'checkpoints')}: checkpoints"
    return GridFile(path, _checkpoints(path, where, tables.get("checkpoints"), found[0]), found, where)


def options_of(groups: tuple[type[Checked], ...]) -> Declared:
    """Every option of some classes, by field."""
    return {name: spec for group in groups for name, spec in declared(group).items()}


_NOT_IN_GRIDS = ("clean", "rm")  # they remove what other lines go on from


def _is_for_grids(name: str) -> bool:
    """Whether a command works on one checkpoint."""
    command = declaration("commands", name, "COMMAND")
    if not isinstance(command, Command) or name in ("grid", *_NOT_IN_GRIDS):
        return False
    return [argument.name for argument in command.arguments] == ["ckpt"]


def _checkpoints(path: Path, where: str, given: Any, first: GridStep) -> list[str]:
    """The checkpoints that the file names, each once, those of a pattern in the order of their names."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigError(f"{where}: expected checkpoint paths or patterns; got {_shown(given)}", path=path)
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


def _shown(value: Any) -> str:
    return "none" if value is None else repr(value)[:80]


_MAKES_ITS_CHECKPOINT = ("train", "extract-features")


def _is_there(name: str, first: GridStep) -> bool:
    """Whether there is a checkpoint or a run of this name, or the first step is to make it."""
    if "run_dir" in first.values or first.command in _MAKES_ITS_CHECKPOINT or Path(name).exists():
        return True
    return RunFolder.of(Path(name), None, is_name=True).root.is_dir()


_GPUS, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
CPU = "cpu"
_ANYWHERE = ("auto", CPU)  # devices of a line that is told where it runs


@dataclass(frozen=True)
class LinePlace:
    """Where one line at a time runs.

    Args:
        name: for people.
        environment: what a process there has beside this one's.
    """

    name: str
    environment: Mapping[str, str]


Axes = Mapping[tuple[str, str], int]  # which value of an option of a step, by both names


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


def places_of(options: GridOptions, jobs: Sequence[Job]) -> list[LinePlace]:
    """The places that the options ask for.

    Raises:
        UsageError: torchrun has started this beside others, or a line asks for another device itself.
        DeviceError: a GPU is not there.
    """
    workers = team.rank_and_size()
    if workers is not None and workers[1] > 1:
        raise UsageError(
            f"grid starts its own processes, but torchrun started {workers[1]} copies of it: run it without torchrun",
            hint="\0devices\0 0,1,2,3 runs a line on each GPU; \0jobs\0 4 runs four on the CPU",
        )
    if options.jobs is None and options.devices is None:
        return [LinePlace("here", {})]
    for job in jobs:
        if job.given.get("device", CPU) not in _ANYWHERE:
            flag = "\0devices\0" if options.jobs is None else "\0jobs\0"
            where = job.step.keys.get("device", job.step.where)
            raise UsageError(f"{where}: {flag} sets where lines run; omit device or {flag}")
    if options.jobs is not None:
        environment = {_GPUS: "", **shared_threads(options.jobs)}
        return [LinePlace(f"cpu {number}", environment) for number in range(options.jobs)]
    visible = _visible([int(one) for one in options.places if one != CPU])
    threads = shared_threads(len(options.places))
    return [
        LinePlace(CPU if one == CPU else f"cuda:{one}", {_GPUS: "" if one == CPU else visible[int(one)], **threads})
        for one in options.places
    ]


def shared_threads(count: int) -> dict[str, str]:
    """The threads of each of so many processes, where nobody has said how many, and there are several."""
    if count == 1 or _THREADS in os.environ:
        return {}
    return {_THREADS: str(max(1, cores() // count))}


def cores() -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _visible(numbers: list[int]) -> dict[int, str]:
    """What CUDA calls each of these GPUs, which are counted among those that this process may see."""
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
    names = [one.strip() for one in os.environ.get(_GPUS, "").split(",") if one.strip()]
    return {number: names[number] if names else str(number) for number in numbers}


MAX_JOBS = 10_000
MAX_NAME = 100  # letters, as of an artifact's
_RESUME = "resume"
_OPTION_FIRST = re.compile("\0([a-z0-9_]+)\0: ")  # of a refusal that is of one option
_COMES_LAST = (
    "evaluate",
    "compare",
    "report",
)  # these read predictions, and draws that they find: what is there must not be chance


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


def checkpoint_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """What tells the checkpoints apart in names of files: the file's own name, or where two share it the whole path."""
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


def filled(value: Any, names: Mapping[str, list[str]]) -> Any:
    """A value with what its references stand for; of a list a text is there once for each of several.

    Args:
        names: by reference, with its star where it has one.
    """
    if not isinstance(value, list):
        return _filled(value, names)[0] if isinstance(value, str) else value
    return [one for item in value for one in (_filled(item, names) if isinstance(item, str) else [item])]


def _filled(text: str, names: Mapping[str, list[str]]) -> list[str]:
    several = next((one[0][1:-1] for one in REFERENCE.finditer(text) if one[2]), None)
    first = {key: known[0] for key, known in names.items()}
    rounds = [{}] if several is None else [{several: chosen} for chosen in names[several]]
    return [_replaced(text, first | chosen) for chosen in rounds]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda one: names[one[0][1:-1]], text)


def line_name(step: GridStep, axes: Axes, steps: Mapping[str, GridStep]) -> str:
    """The step's name, with each value that is one of several, those of the steps that it refers to first."""
    words = [step.name, *(_word(option, steps[of].values[option][place]) for (of, option), place in axes.items())]
    return "-".join(words)


def _word(option: str, value: Any) -> str:
    """A value in a name: a plain word as it is, anything else behind the option."""
    flag = flag_of(option)[2:]
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    text = "+".join(value) if isinstance(value, list) else number_text(value)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text):
        return text
    return flag + re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"(?<=\d)\.(?=\d)", "p", text)).strip("-")


def number_text(value: Any) -> str:
    """A number in the shortest words that give it back; anything else as it is."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def shortened(name: str) -> str:
    """A name of at most MAX_NAME letters: a long one with a digest for its end."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{json_sha256(name)[:8]}"


def _refusal(line: CommandLine) -> str | None:
    """What the command line says against a line; None where it takes it."""
    try:
        values = CommandLine.parse(line.command, line.words()[2:], line.groups).values()
        for group in line.groups:
            made(group, values)
    except (BnnError, ValueError, LookupError) as error:
        return error.message if isinstance(error, BnnError) else str(error)
    return None


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


def references(values: Iterable[Any]) -> list[tuple[str, bool]]:
    """Steps whose posteriors these values name, and whether each is all of that step's own axes together."""
    found = (one for value in values for text in texts(value) for one in REFERENCE.finditer(text))
    pairs = dict.fromkeys((one[1], bool(one[2])) for one in found)
    return [pair for pair in pairs if pair[0] not in (CHECKPOINT, JOB)]


def texts(value: Any) -> list[str]:
    """The texts of a value, in which references may stand."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
