"""The steps of a grid: commands with what each of their options may be, and what their values stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bnncli.errors import ConfigError
from bnncli.options.command import NameOptions, RecordOptions
from bnncli.options.declaration import Checked, Declared, declared

CHECKPOINT, JOB = "checkpoint", "job"  # what every line may put into its values, beside names of steps
REFERENCE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(\*?)\}")  # so that shards-{000..009}.tar is none
NAMES_ITSELF = ("predict",)  # its results are named after what it predicts with

Axes = Mapping[tuple[str, str], int]  # which value of an option of a step, by both names


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


def options_of(groups: tuple[type[Checked], ...]) -> Declared:
    """Every option of some classes, by field."""
    return {name: spec for group in groups for name, spec in declared(group).items()}


def texts(value: Any) -> list[str]:
    """The texts of a value, in which references may stand."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def references(values: Iterable[Any]) -> list[tuple[str, bool]]:
    """Steps whose posteriors these values name, and whether each is all of that step's own axes together."""
    found = (one for value in values for text in texts(value) for one in REFERENCE.finditer(text))
    pairs = dict.fromkeys((one[1], bool(one[2])) for one in found)
    return [pair for pair in pairs if pair[0] not in (CHECKPOINT, JOB)]


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
