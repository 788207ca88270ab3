"""Tables of a page: a caption, heads of rows and columns, a box of their own that scrolls where they are wide."""

from __future__ import annotations

from bnncli.figures.shown import Cell, Shown
from bnncli.pages.blocks import DataTable, TableCell
from bnncli.pages.markup import Markup, element, paragraph

_DIGITS = 4  # of the numbers of figures, which have fewer pixels than four digits tell


def table_of(table: DataTable) -> Markup:
    """The table with its caption and notes."""
    head = element("tr", *(element("th", column, scope="col") for column in table.columns))
    rows = [
        element("tr", element("th", row[0].text, scope="row"), *(_cell(cell) for cell in row[1:])) for row in table.rows
    ]
    caption = _caption(table.caption)
    whole = element("table", caption, element("thead", head), element("tbody", *rows), class_="sortable")
    notes = [paragraph(note, kind="note") for note in table.notes]
    box = element("div", scrolled(whole, table.caption), *notes, class_="table", id=table.name)
    return element("details", element("summary", table.caption), box) if table.is_folded else box


def numbers_of(shown: Shown) -> Markup:
    """The numbers of a figure as a table that is shown when it is asked for."""
    numbers, title = shown.numbers, shown.title
    head = element("tr", *(element("th", column, scope="col") for column in numbers.columns))
    rows = [element("tr", *(element("td", _text(cell)) for cell in row)) for row in numbers.rows]
    caption = _caption(f"{title}: the numbers")
    whole = element("table", caption, element("thead", head), element("tbody", *rows))
    return element("details", element("summary", "Numbers"), scrolled(whole, f"Numbers of {shown.name}"))


def _cell(cell: TableCell) -> Markup:
    is_number = cell.number is not None
    below = [element("small", line) for line in cell.below]
    return element(
        "td",
        cell.text,
        *below,
        class_="number" if is_number else None,
        data_sort=repr(cell.number) if is_number else None,
    )


def _caption(text: str) -> Markup:
    """The caption in a box of its own, which stays where it is when the table is scrolled."""
    return element("caption", element("span", text))


def scrolled(content: Markup, label: str) -> Markup:
    """A box that scrolls sideways where its content is wider than the page."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.{_DIGITS}g}" if isinstance(cell, float) else str(cell)
