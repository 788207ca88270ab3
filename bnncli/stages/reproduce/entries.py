"""TOML tables of recipes: keys taken with their types, none left over; a fault names the file and the place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bnncli.errors import ConfigError
from bnncli.options.toml import closest

Kind = TypeVar("Kind")
_NONE = object()
_CALLED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "a table",
    list: "a list",
    bool: "true or false",
}


@dataclass(frozen=True)
class Entries:
    """One table, of which each key is taken once.

    Args:
        where: it stands, for messages.
    """

    path: Path
    where: str
    entries: dict[str, Any]

    def fault(self, said: str) -> ConfigError:
        """The error for something in the table."""
        return ConfigError(f"{self.path}: {self.where}{said}", path=self.path)

    def take(self, key: str, kind: type[Kind], default: Any = _NONE) -> Kind:
        """A value of this type; the default where the key is not there. Raises ConfigError for another type, or none."""
        if key not in self.entries:
            if default is _NONE:
                raise self.fault(f"expected {key!r}, {_CALLED[kind]}; got none")
            return default
        value = self.entries.pop(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(f"{key}: expected {_CALLED[kind]}; got {value!r}")
        return value

    def texts(self, key: str) -> dict[str, str]:
        """A table of texts."""
        found = self.take(key, dict, {})
        if not all(isinstance(one, str) for one in found.values()):
            raise self.fault(f"{key}: expected texts; got {found!r}")
        return dict(found)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.take(key, list, [])
        if not all(isinstance(one, str) for one in found):
            raise self.fault(f"{key}: expected texts; got {found!r}")
        return tuple(found)

    def tables(self, key: str) -> list[Entries]:
        """A list of tables, each with its place in it."""
        found = self.take(key, list, [])
        if not all(isinstance(one, dict) for one in found):
            raise self.fault(f"{key}: expected tables, as [[{key}]]; got {found!r}")
        return [Entries(self.path, f"{self.where}{key} {n}: ", dict(one)) for n, one in enumerate(found, start=1)]

    def by_name(self, key: str) -> dict[str, Entries]:
        """A table of tables."""
        found = self.take(key, dict, {})
        if not all(isinstance(one, dict) for one in found.values()):
            raise self.fault(f"{key}: expected tables, as [{key}.NAME]; got {found!r}")
        return {name: Entries(self.path, f"{self.where}{key}.{name}: ", dict(one)) for name, one in found.items()}

    def end(self, known: Mapping[str, Any] | tuple[str, ...]) -> None:
        """Pass where every key was taken. Raises ConfigError for one that is none of the known."""
        for key in self.entries:
            raise self.fault(f"unknown key {key!r}{closest(key, sorted(known))}")
