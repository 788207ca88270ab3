"""Numbers of several data sets, each with its own, and what is drawn of the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from bnncli.progress import Task

One = tuple[Mapping[str, float], Mapping[str, Any]]  # numbers and arrays of a data set


def repeated(
    measure_one: Callable[[], One], repeats: int, task: Task
) -> tuple[dict[str, list[float]], Mapping[str, Any]]:
    """The numbers of every data set, by name, and the arrays of the first."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    arrays: Mapping[str, Any] = {}
    for _ in range(repeats):
        values, drawn = measure_one()
        for name, value in values.items():
            found[name].append(value)
        arrays = arrays or drawn
        task.advance()
    return dict(found), arrays
