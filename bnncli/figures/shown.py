"""A figure as data: its name, title, description and numbers, of which the picture and the table beside it are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bnncli.figures import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_WIDTH = 4.8  # inches: letters of 10 points stay readable where a phone shows all of it

Cell = str | int | float | None


class FigureNumbers(NamedTuple):
    """The numbers that a figure shows, a row each or a row a point; None where there is none."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Shown(Protocol):
    """A figure before it is drawn. Its numbers are aggregates, whose count does not grow with that of the examples."""

    @property
    def name(self) -> str:
        """Letters, digits, dots and dashes: of its file, and of its place in a page."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    @property
    def description(self) -> str:
        """What it shows and how it is read, for whoever does not see it."""

    @property
    def numbers(self) -> FigureNumbers:
        """All that is drawn, as numbers."""

    def draw(self) -> Figure:
        """The picture of these numbers."""


@contextmanager
def own_style() -> Iterator[None]:
    """Figures are drawn and saved inside the block as matplotlib comes, whatever style its user has set."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def figure_file(shown: Shown, form: str) -> bytes:
    """The file of a figure as png, pdf or svg, with its title and, where the form has room for it, its description."""
    with own_style():
        return render(shown.draw(), form, title=shown.title, description=shown.description)
