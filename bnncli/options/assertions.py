"""Assertions about scores, as text: `ece<=0.02`, `laplace.mc.auroc:kmnist>=0.8`, `ece-excess<=0.01`, `nll<map.nll`; parsed and written back."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bnncli.errors import UsageError
from bnncli.evaluation.scores import declared
from bnncli.names import near_miss, not_one_of

GRAMMAR = "[POSTERIOR[.INTEGRATOR].]METRIC[-PART][:CHOICE...][@SPLIT], then <=, <, >=, >, == or !=, then a number or another score"
PARTS = ("excess", "floor", "low", "high")  # what can be asked of a metric instead of its value
_OF_FLOORS = ("excess", "floor")  # of metrics that a calibrated model scores above 0 by chance
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_NAME, _DOTTED = r"[A-Za-z0-9][A-Za-z0-9_-]*", r"[A-Za-z0-9][A-Za-z0-9._-]*"
_QUANTITY = re.compile(
    rf"(?:({_NAME})\.)?(?:({_NAME})\.)?([a-z][a-z0-9_]*)(?:-([a-z]+))?((?::{_DOTTED})*)(?:@({_DOTTED}))?", re.ASCII
)


class Quantity(NamedTuple):
    """A score: its metric, the choices that tell its forms apart, of which posterior, integrator and split (None: not said).

    `part` is what is asked of it, one of PARTS: its value above that of a calibrated model (`excess`), that value (`floor`),
    an end of its interval (`low`, `high`); None: the value.
    """

    metric: str
    choices: tuple[str, ...] = ()
    posterior: str | None = None
    integrator: str | None = None
    split: str | None = None
    part: str | None = None

    @property
    def label(self) -> str:
        """The score alone: metric, part and choices."""
        metric = self.metric if self.part is None else f"{self.metric}-{self.part}"
        return ":".join((metric, *self.choices))

    def __str__(self) -> str:
        names = "".join(f"{name}." for name in (self.posterior, self.integrator) if name is not None)
        split = "" if self.split is None else f"@{self.split}"
        return names + self.label + split


class Assertion(NamedTuple):
    """A score, an operator, and a number or another score."""

    left: Quantity
    operator: str
    right: Quantity | float

    def holds(self, left: float, right: float) -> bool:
        """Whether the two values stand in the relation that is asserted."""
        return _OPERATORS[self.operator](left, right)

    def __str__(self) -> str:
        right = f"{self.right!r}" if isinstance(self.right, float) else str(self.right)
        return f"{self.left}{self.operator}{right.removesuffix('.0')}"


def parse_assertion(text: str, flag: str, metrics: Sequence[str]) -> Assertion:
    """The assertion that `text` says.

    Args:
        flag: the option it came by, for messages.
        metrics: the names a metric can have.

    Raises:
        UsageError: the text does not follow the grammar, a metric or a part is unknown, a number is not finite.
    """
    match = re.fullmatch(r"([^<>=!]*)(<=|>=|==|!=|<|>)([^<>=!]*)", text)
    if match is None:
        raise _refusal(flag, text)
    left, sign, right = (part.strip() for part in match.groups())
    if _number(left) is not None:
        raise UsageError(f"{flag}: the left side of {text!r} is a number; put the score there")
    number = _number(right)
    if number is None and (share := _number(right.removesuffix("%").rstrip())) is not None:
        quantity = _quantity(left, text, flag, metrics)
        if declared()[quantity.metric].limits == (0, 1):
            said = f"write {quantity}{sign}{share / 100:g}"
            raise UsageError(f"{flag}: {quantity.metric} is a fraction; got {right} in {text!r}", hint=said)
    if number is None:
        return Assertion(_quantity(left, text, flag, metrics), sign, _quantity(right, text, flag, metrics))
    if not math.isfinite(number):
        raise UsageError(f"{flag}: expected a finite number; got {right!r} in {text!r}")
    quantity = _quantity(left, text, flag, metrics)
    if number > 1 and declared()[quantity.metric].limits == (0, 1):
        hint = f"write {quantity}{sign}{number / 100:g}" if number <= 100 else None
        raise UsageError(f"{flag}: {quantity.metric} is a fraction, from 0 to 1; got {right} in {text!r}", hint=hint)
    return Assertion(quantity, sign, number)


def parse_score(text: str, flag: str, metrics: Sequence[str]) -> Quantity:
    """The score METRIC[:CHOICE...] that `text` says, of no posterior or split in particular. Raises UsageError otherwise."""
    match = _QUANTITY.fullmatch(text)
    if match is None or any(match.group(place) is not None for place in (1, 2, 4, 6)):
        raise UsageError(f"{flag}: expected METRIC[:CHOICE...], such as ece or auroc:mnist; got {text!r}")
    return _quantity(text, text, flag, metrics)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _quantity(part: str, text: str, flag: str, metrics: Sequence[str]) -> Quantity:
    match = _QUANTITY.fullmatch(part)
    if match is None:
        raise _refusal(flag, text)
    posterior, integrator, metric, part, choices, split = match.groups()
    if metric not in metrics:
        raise UsageError(
            f"{flag}: unknown metric {metric!r} in {text!r}; expected one of {', '.join(metrics)}",
            hint=near_miss(metric, metrics),
        )
    if part is not None and part not in PARTS:
        raise not_one_of(f"{flag} {text}: part of {metric}", part, PARTS)
    if part in _OF_FLOORS and not declared()[metric].has_floor:
        owners = ", ".join(name for name, score in declared().items() if score.has_floor and name in metrics)
        raise UsageError(
            f"{flag}: {metric} has no {part} in {text!r}; expected low or high, or a metric with {part}: {owners}"
        )
    return Quantity(metric, tuple(choices.split(":")[1:]), posterior, integrator, split, part)


def _refusal(flag: str, text: str) -> UsageError:
    return UsageError(f"{flag}: expected {GRAMMAR}, such as ece<=0.02 or nll<map.nll; got {text!r}")
