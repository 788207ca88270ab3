"""Data sets of which the numbers are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bnncli.experiments._repeats import repeated
from bnncli.progress import SILENT


def data_sets() -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    for number in range(3):
        yield {"a": float(number), "b": -1.0}, {"x": number}


def test_numbers_are_of_every_data_set_and_arrays_of_the_first() -> None:
    each = data_sets()
    found, arrays = repeated(lambda: next(each), 3, SILENT.task("x", 3))
    assert found == {"a": [0.0, 1.0, 2.0], "b": [-1.0] * 3}
    assert arrays == {"x": 0}
