"""When draws are enough, as text: conditions such as rhat<=1.01,ess>=400, and whether measured values meet them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bnncli.errors import UsageError

GRAMMAR = "rhat<=NUMBER, ess>=NUMBER, ess-tail>=NUMBER, joined by commas, each at most once"
_DIRECTIONS = {"rhat": "<=", "ess": ">=", "ess-tail": ">="}


class Condition(NamedTuple):
    """A bound on one quantity: rhat from above, ess and ess-tail from below."""

    name: str
    bound: float

    def is_met(self, value: float | None) -> bool:
        """True when the value is there and within the bound."""
        if value is None:
            return False
        return value <= self.bound if _DIRECTIONS[self.name] == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{_DIRECTIONS[self.name]}{self.bound:g}"


def parse_until(text: str, flag: str) -> tuple[Condition, ...]:
    """The conditions that `text` says. Raises UsageError, with the grammar, when it says none."""
    found: dict[str, Condition] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z-]+)\s*([<>]=)\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*", part)
        name, direction, number = match.groups() if match else ("", "", "0")
        if _DIRECTIONS.get(name) != direction or name in found:
            raise UsageError(f"{flag}: expected {GRAMMAR}; got {text!r}")
        smallest = 1.0 if name == "rhat" else 0.0
        if not smallest < float(number) < float("inf"):
            raise UsageError(f"{flag}: the bound of {name} must be above {smallest:g}; got {number}")
        found[name] = Condition(name, float(number))
    return tuple(found.values())


def unmet(conditions: Sequence[Condition], values: Mapping[str, float | None]) -> list[Condition]:
    """The conditions that the values, by name, do not meet; a value that is None meets none."""
    return [condition for condition in conditions if not condition.is_met(values[condition.name])]
