"""What a part gives: a title, columns, rows, and notes below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = float | int | str | None


@dataclass
class Table:
    """One table of a part.

    Args:
        title: what it is of, with sizes.
        columns: heads, and how a number of the column is written (as `.4f`; empty as it is).
        rows: values by column; what is missing is a dash.
        notes: lines below, verbatim.
    """

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """As text, in columns."""
        cells = [list(self.columns)]
        cells += [[_written(row.get(name), form) for name, form in self.columns.items()] for row in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        return [self.title, _line(cells[0], widths), "-+-".join("-" * width for width in widths)] + [
            _line(row, widths) for row in cells[1:]
        ] + self.notes  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {"title": self.title, "columns": list(self.columns), "rows": self.rows, "notes": self.notes}


def _written(value: Cell, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else format(value, form)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        f"{cell:{'<' if i == 0 else '>'}{width}}" for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return " | ".join([first, *others])
