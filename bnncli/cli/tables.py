"""Tables for people, on stdout: drawn by rich, in plain characters, as wide as they need off a terminal."""

from __future__ import annotations

from typing import Any, TextIO

from bnncli.names import printable
from bnncli.options.declaration import spelled

WIDE = 100_000
_EMPTY = ("", "-")  # a column of nothing else is not shown


def print_table(table: Any, stream: TextIO) -> None:
    """Print a Table (bnncli.run.session.Table): title, header, rows, notes."""
    from rich.console import Console

    console = Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, emoji=False, markup=False)
    console.begin_capture()  # rich itself would answer a broken pipe by leaving the program
    is_narrow = stream.isatty() and bool(table.narrow) and _width(table) > console.width
    for part in table.narrow if is_narrow else [table]:
        _draw(part, console, is_terminal=stream.isatty())
    for note in table.notes:
        console.print(printable(spelled(note)), soft_wrap=True)
    stream.write(console.end_capture())


def _draw(table: Any, console: Any, *, is_terminal: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if table.title:
        console.print(printable(spelled(table.title)), soft_wrap=True)
    drawn = Table(box=box.SIMPLE_HEAD if is_terminal else box.ASCII2, show_edge=is_terminal, pad_edge=False)
    shown = [
        i
        for i in range(len(table.columns))
        if i == 0 or not table.rows or any(row[i].strip() not in _EMPTY for row in table.rows)
    ]
    for i in shown:
        is_number = i > 0 and all(_is_number(row[i]) for row in table.rows)
        drawn.add_column(Text(printable(table.columns[i])), justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(spelled(row[i]))) for i in shown))
    console.print(drawn)


def _width(table: Any) -> int:
    """Characters that the table takes when nothing is folded."""
    widths = [max(len(row[i]) for row in [table.columns, *table.rows]) for i in range(len(table.columns))]
    return sum(widths) + 2 * len(widths) + 2


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "-+.0123456789"
