"""The file of a grid, TOML: its checkpoints, and steps with options, a list of values being an axis; checked before anything runs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import ConfigError, MissingInput
from bnncli.options.command import Command, CommonOptions
from bnncli.options.declaration import Checked, Declared, declaration, flag_of
from bnncli.options.grid import GridOptions
from bnncli.options.toml import base_type, closest, faults_of, line_of, option_value, read_toml
from bnncli.stages.grid.steps import CHECKPOINT, JOB, REFERENCE, GridFile, GridStep, options_of, references, texts

_MAKES_ITS_CHECKPOINT = ("train", "extract-features")
_KEYS = ("command", "name", "after")
_NOT_OF_STEPS = {
    spec.name: "grid controls how and where each line reports; remove this option" for spec in fields(CommonOptions)
} | {
    "force": "a line that continues after a kill must not start over; remove the artifacts that should be created again",
    "dry_run": "it is an option of grid",
    "resume": "grid adds it to lines that can continue",
}
_NOT_IN_GRIDS = ("clean", "rm")  # they remove what other lines go on from
_HEADER = re.compile(r"\s*\[\[\s*[\"']?step[\"']?\s*\]\]")


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


def _shown(value: Any) -> str:
    return "none" if value is None else repr(value)[:80]


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


def _is_there(name: str, first: GridStep) -> bool:
    """Whether there is a checkpoint or a run of this name, or the first step is to make it."""
    if "run_dir" in first.values or first.command in _MAKES_ITS_CHECKPOINT or Path(name).exists():
        return True
    return RunFolder.of(Path(name), None, is_name=True).root.is_dir()


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
        choices = [one for one in registry.names("stages") if _is_for_grids(one)]
        if name not in choices:
            said = f"no command called {name!r} in grids" if is_given else "expected the command of the step; got none"
            raise self.fault("command", f"{said}{closest(name, choices)}")
        command: Command = declaration("stages", name, "COMMAND")
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


def _is_for_grids(name: str) -> bool:
    """Whether a command works on one checkpoint."""
    command = declaration("stages", name, "COMMAND")
    if not isinstance(command, Command) or GridOptions in command.groups or name in _NOT_IN_GRIDS:
        return False
    return [argument.name for argument in command.arguments] == ["ckpt"]
