"""Columns of tables that must be numbers: all of them at once where that can be, else block by block; and which cell is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bnncli.data._columns import LIST, TEXT
from bnncli.data._table import StoredTable
from bnncli.errors import DataError
from bnncli.names import quoted

_BLOCK_VALUES = 1 << 20  # read at once, where that is row by row


class NumberTable(StoredTable, Protocol):
    """A table that gives columns of numbers as arrays."""

    def numbers(self, names: Sequence[str]) -> np.ndarray | None:
        """(N, columns) float64 of some columns, or of one of lists; None where they must be read row by row."""


def numbers_of(table: NumberTable, names: Sequence[str], num_rows: int, where: str) -> np.ndarray:
    """(N, C) float64 of columns of numbers, or of one column of lists.

    Raises:
        DataError: a cell is no number, or the lists differ in length.
    """
    found = table.numbers(names)
    return found if found is not None and len(found) == num_rows else _by_rows(table, names, num_rows, where)


def _by_rows(table: NumberTable, names: Sequence[str], num_rows: int, where: str) -> np.ndarray:
    size = max(1, _BLOCK_VALUES // max(8, len(names)))
    is_list = len(names) == 1 and table.columns[names[0]] == LIST
    found = []
    for start in range(0, num_rows, size):
        columns = table.read(np.arange(start, min(start + size, num_rows)), names)
        try:
            block = np.array(columns[0] if is_list else columns, dtype=np.float64)
        except (ValueError, TypeError):
            raise _odd_number(columns, names, start, where, is_list=is_list) from None
        found.append(block if is_list else block.T)
        if found[-1].ndim != 2 or found[-1].shape[1] != found[0].shape[1]:
            raise DataError(f"{where}: the lists in column {quoted(names[0])} have different lengths", path=table.path)
    return np.concatenate(found)


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


def check_points(table: StoredTable, where: str) -> None:
    """Raise DataError for a column of texts that begins with a number with a decimal comma."""
    for name in [name for name, holds in table.columns.items() if holds == TEXT]:
        column = table.values([name])[1][0]
        if column and _COMMA.fullmatch(str(column[0])):
            raise _no_number(where, 0, name, column[0])


def _odd_number(
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
                    f"{where}: row {start + place}: column {quoted(name)} has {len(value)} numbers, but the "
                    f"first row has {len(column[0])}"
                )
            try:
                np.float64(value) if not is_list else np.array(value, np.float64)
            except (ValueError, TypeError):
                return _no_number(where, start + place, name, value)
    return DataError(f"{where}: column {quoted(names[0])} has values that are not numbers")


def _is_number(value: Any) -> bool:
    try:
        np.float64(value)
    except (ValueError, TypeError):
        return False
    return True


def _no_number(where: str, row: int, name: str, value: Any) -> DataError:
    came = quoted(value) if value not in ("", None) else "nothing"
    hint = f"use a decimal point: {value.replace(',', '.')}" if _COMMA.fullmatch(str(value)) else None
    return DataError(f"{where}: row {row}, column {quoted(name)}: expected a number, got {came}", hint=hint)


_COMMA = re.compile(r"\s*[-+]?[0-9]+,[0-9]+([eE][-+]?[0-9]+)?\s*")  # a number with a decimal comma
