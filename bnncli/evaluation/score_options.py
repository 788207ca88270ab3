"""Options that scores bring: what sets a score is declared in its own file, and given to the commands that score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bnncli import registry


@dataclass(frozen=True, kw_only=True)
class ScoreOption:
    """An option of evaluate that sets a score, or a score of single examples.

    Args:
        text: its help; an option is meant by its field, as in messages.
        default: where nothing else is said; recorded with the metrics as any other value.
        in_compare: its help in compare, which has it as well; empty where that has not.
        type: of the value.
        minimum, maximum: bounds of a number, inclusive.
        metavar: stands for the value in the help.
        check: raises UsageError for a value, which the option of that name has, that is none.
        place: among the options of the scores, ascending; those that have none stand last.
    """

    text: str
    default: Any
    in_compare: str = ""
    type: type = int
    minimum: float | None = None
    maximum: float | None = None
    metavar: str = ""
    check: Callable[[Any, str], object] | None = None
    place: int = 1000


def merged(family: str, declared: Mapping[str, Mapping[str, ScoreOption]]) -> dict[str, ScoreOption]:
    """Every option by its name, in order.

    Args:
        declared: the options of each score.

    Raises:
        UsageError: two scores have different options of one name.
    """
    found: dict[str, ScoreOption] = {}
    for score, options in declared.items():
        for name, one in options.items():
            if found.setdefault(name, one) != one:
                part = score.replace("_", "-")
                raise registry.broken(
                    family, part, f"its option {name} differs from another score's option of the same name"
                )
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))
