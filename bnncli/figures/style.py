"""Style of figures (colours for light and dark pages, lines, grids), and the interface of a figure."""

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

# Dark counterparts with equal contrast. Ink and paper use the page's own colours.
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
    """Return the CSS value of a colour that adapts to the page; ink and paper use the page's own."""
    named = {INK: "currentColor", PAPER: "var(--paper)"}
    return named.get(ink) or f"var(--ink-{ink[1:]})"


def declarations(*, is_dark: bool) -> str:
    """Return the CSS declarations of the colours, light or dark."""
    return " ".join(f"--ink-{light[1:]}: {dark if is_dark else light};" for light, dark in DARK.items())


# Okabe and Ito's colours, from dark to light, that are dark enough on white; they differ in grey as well.
_COLORS = (INK, BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 1.5, 1.5, 1.5)), (0, (1, 1)))
_LEGEND_LINE = 0.18  # inches, in small type
__all__ = ["GREY", "PALE", "legend_of", "line_style", "plain_axes"]


def line_style(place: int) -> dict[str, Any]:
    """Return colour and dash of the curve at `place`; the combinations repeat after 35."""
    return {"color": _COLORS[place % len(_COLORS)], "linestyle": _DASHES[place % len(_DASHES)], "linewidth": 1.5}


def plain_axes(axes: Axes) -> None:
    """Draw a pale grid below the curves and only the two axes as frame."""
    axes.grid(visible=True, which="major", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_of(axes: Axes, num_curves: int, title: str, loc: Literal["best", "lower right"] = "best") -> None:
    """Add a legend: inside the axes at `loc` for up to 8 curves, else beside them with room of its own."""
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


PAGE_WIDTH = 4.8  # inches; 10-point letters stay readable on a phone

Cell = str | int | float | None


class FigureNumbers(NamedTuple):
    """The numbers of a figure, one row each or one per point; None for missing values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class FigureContent(Protocol):
    """A figure before it is drawn. Its numbers are aggregates; their count does not grow with the number of examples."""

    @property
    def name(self) -> str:
        """Name of the file and of the place in a page: letters, digits, dots and dashes."""

    @property
    def title(self) -> str:
        """A few words."""

    @property
    def description(self) -> str:
        """Return a description of the figure and how to read it, also for screen readers."""

    @property
    def numbers(self) -> FigureNumbers:
        """Everything that is drawn, as numbers."""

    def draw(self) -> Figure:
        """Draw the figure."""


@contextmanager
def own_style() -> Iterator[None]:
    """Draw and save figures with matplotlib's defaults inside the context, whatever the user's style."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def figure_file(shown: FigureContent, form: str) -> bytes:
    """Return the file of a figure as png, pdf or svg, with its title and description as metadata."""
    with own_style():
        return render(shown.draw(), form, title=shown.title, description=shown.description)
