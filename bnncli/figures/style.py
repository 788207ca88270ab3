"""The look of figures: colours for light and dark pages, lines, grids; and a figure as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from bnncli.figures import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, PAPER, GREY, PALE = "#000000", "#ffffff", "#5b5b5b", "#dddddd"
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"

# Of equal standing: as far from dark paper as the first is from white. Ink and paper are the page's own.
DARK = {
    GREY: "#a9b0b8",
    PALE: "#3a4149",
    BLUE: "#5cb3f0",
    VERMILION: "#ff9150",
    GREEN: "#35c99b",
    "#cc79a7": "#e6a1c8",
    "#e69f00": "#f2b63c",
    "#56b4e9": "#9ad6fb",
    "#7fa8cf": "#3f6c99",
    "#c44601": "#ff9150",
    "#b34700": "#ff9150",
    "#1f4e79": "#8cbdf0",
}


def variable(ink: str) -> str:
    """The CSS of a colour that a page may turn: ink and paper as the page has them."""
    named = {INK: "currentColor", PAPER: "var(--paper)"}
    return named.get(ink) or f"var(--ink-{ink[1:]})"


def declarations(*, is_dark: bool) -> str:
    """The CSS that declares them for one of the two."""
    return " ".join(f"--ink-{light[1:]}: {dark if is_dark else light};" for light, dark in DARK.items())


# Okabe and Ito's colours that are dark enough on white, from dark to light, so that they differ in grey as well.
_COLORS = (INK, BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 1.5, 1.5, 1.5)), (0, (1, 1)))
_LEGEND_LINE = 0.18  # inches, in small type
__all__ = ["GREY", "PALE", "legend_of", "line_style", "plain_axes"]


def line_style(place: int) -> dict[str, Any]:
    """Colour and dash of the curve at `place`; they repeat together after 35."""
    return {"color": _COLORS[place % len(_COLORS)], "linestyle": _DASHES[place % len(_DASHES)], "linewidth": 1.5}


def plain_axes(axes: Axes) -> None:
    """A pale grid below the curves, and no frame but the two axes."""
    axes.grid(visible=True, which="major", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_of(axes: Axes, num_curves: int, title: str, loc: Literal["best", "lower right"] = "best") -> None:
    """A legend inside the axes, at `loc`, by default where it covers least; beside them, in room of its own, where it would be too long for that."""
    if num_curves <= 8:
        axes.legend(
            frameon=True,
            framealpha=0.9,
            edgecolor="none",
            fontsize="small",
            title=title,
            title_fontsize="small",
            loc=loc,
        )
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(max(figure.get_figheight(), 0.6 + _LEGEND_LINE * num_curves))
    figure.legend(frameon=False, fontsize="small", title=title, title_fontsize="small", loc="outside right upper")


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
