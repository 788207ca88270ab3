"""How an option is declared: a dataclass field with its default, help, choices and bounds; checked when built."""

from __future__ import annotations

import math
import re
from dataclasses import Field, field, fields
from typing import Any

from bnncli import registry
from bnncli.errors import UsageError


def option(
    default: Any,
    text: str,
    *,
    family: str | None = None,
    choices: tuple[str, ...] = (),
    short: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    numeric: bool = True,
    env_common: bool = False,
    metavar: str = "",
) -> Any:
    """A dataclass field with what the command line needs to know about it.

    Args:
        default: the value when nothing says otherwise; a list makes the option repeatable.
        text: one line of help.
        family: a registry folder whose file names are the choices.
        choices: the values allowed, when they are fixed; beside a family, further ones.
        minimum, maximum: bounds of a number, inclusive.
        numeric: True when the value changes the numbers in the artifact.
    """
    meta = {
        "help": text,
        "family": family,
        "choices": choices,
        "short": short,
        "minimum": minimum,
        "maximum": maximum,
        "numeric": numeric,
        "env_common": env_common,
        "metavar": metavar,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def flag_of(name: str) -> str:
    """The option that a field is: --prior-precision for prior_precision, --assert for assert_ (a keyword of Python)."""
    return "--" + name.rstrip("_").replace("_", "-")


def choices_of(meta: Any) -> list[str]:
    """The values an option allows, from its family folder and its fixed list; empty when anything goes."""
    return [*(registry.names(meta["family"]) if meta["family"] else []), *meta["choices"]]


def check_value(spec: Field[Any], value: Any, where: str) -> None:
    """Raise UsageError, naming `where` the value came from, unless it is one of the choices and within the bounds."""
    meta = spec.metadata
    if value is None:
        return
    allowed = choices_of(meta)
    for item in value if isinstance(value, list) else [value]:
        if allowed and item not in allowed:
            raise UsageError(f"{where}: expected one of {', '.join(allowed)}; got {item!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: expected a finite number; got {value}")
    low, high = meta["minimum"], meta["maximum"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise UsageError(f"{where}: expected a number of {' and '.join(bounds)}; got {value}")


class Checked:
    """Checks choices and bounds of every field when built, so that an options object is always valid."""

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]
            check_value(spec, getattr(self, spec.name), flag_of(spec.name))

    def params(self) -> dict[str, Any]:
        """The options that change numbers, as recorded and hashed in the artifact."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.metadata["numeric"]}  # type: ignore[arg-type]


def check_artifact_name(name: str, flag: str) -> str:
    """`name` itself, when it can be a file name and a table entry. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
        raise UsageError(f"{flag}: expected letters, digits, - and _ (at most 100); got {name!r}")
    return name


def check_split_name(name: str, flag: str) -> str:
    """`name` itself, when it can name a split: as an artifact's name, dots allowed. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"{flag}: a split's name has letters, digits, dots, dashes and underscores; got {name!r}")
    return name


def check_suffix(path: str, flag: str, allowed: tuple[str, ...]) -> str:
    """The suffix of a file's name in lower case, without its dot. Raises UsageError unless it is allowed."""
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in allowed:
        raise UsageError(f"{flag}: expected a file ending in {', '.join('.' + kind for kind in allowed)}; got {path!r}")
    return suffix


SMALLEST, LARGEST = (
    1e-30,
    1e30,
)  # of numbers whose squares and quotients must stay within float64, themselves in float32


def parse_positive(text: str, flag: str, expected: str = "a positive number") -> float:
    """The positive number that `text` says, from SMALLEST to LARGEST. Raises UsageError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag}: expected {expected}; got {text!r}")
    if not SMALLEST <= value <= LARGEST:
        raise UsageError(f"{flag}: expected a number from {SMALLEST:g} to {LARGEST:g}; got {text!r}")
    return value
