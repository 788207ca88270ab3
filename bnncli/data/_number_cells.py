"""Cells of tables that must be numbers: which one is none, by its column and row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncli.data._table import StoredTable
from bnncli.errors import DataError
from bnncli.names import quoted


def check_cells(table: StoredTable, names: Sequence[str], where: str) -> None:
    """Raise DataError for the first cell that is no number, of columns of texts at least half of which are numbers."""
    columns = table.values(names)[1] if names else []
    odd = {
        name: [row for row, value in enumerate(column) if not _is_number(value)]
        for name, column in zip(names, columns, strict=True)
    }
    first = [(rows[0], place) for place, rows in enumerate(odd.values()) if 0 < 2 * len(rows) <= len(columns[place])]
    if first:
        row, place = min(first)
        raise _no_number(where, row, names[place], columns[place][row])


def odd_number(
    columns: Sequence[Sequence[Any]], names: Sequence[str], start: int, where: str, *, is_list: bool
) -> DataError:
    """The error for the first value of a block of columns that is no number, or no list of as many numbers as the first.

    Args:
        start: the row at which the block begins.
    """
    for name, column in zip(names, columns, strict=True):
        for place, value in enumerate(column):
            if is_list and isinstance(value, list) and len(value) != len(column[0] or ()):
                return DataError(
                    f"{where}: row {start + place}: column {quoted(name)} has {len(value)} numbers, the first row {len(column[0])}"
                )
            try:
                np.float64(value) if not is_list else np.array(value, np.float64)
            except (ValueError, TypeError):
                return _no_number(where, start + place, name, value)
    return DataError(f"{where}: column {quoted(names[0])} has values that are no numbers")


def _is_number(value: Any) -> bool:
    try:
        np.float64(value)
    except (ValueError, TypeError):
        return False
    return True


def _no_number(where: str, row: int, name: str, value: Any) -> DataError:
    came = quoted(value) if value not in ("", None) else "nothing"
    return DataError(f"{where}: row {row}, column {quoted(name)}: expected a number, got {came}")
