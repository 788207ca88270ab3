"""Figures of scores: intervals per posterior, and posteriors side by side with their seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.figures.style import GREY, Cell, FigureNumbers, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ScoreIntervals:
    """Scores side by side.

    Args:
        key: file name, letters and dashes.
        names: posteriors, one per line of every panel.
        panels: as for `draw_comparison`.
        title: what is compared, on which split.
        explained: sentence that explains dots, lines and marks.
        marked, plain, tests: as for `draw_comparison`.
    """

    key: str
    names: Sequence[str]
    panels: Sequence[ScorePanel]
    title: str
    explained: str
    marked: str | None = None
    plain: str = ""
    tests: str = ""

    @property
    def name(self) -> str:
        return self.key

    @property
    def description(self) -> str:
        return f"One panel per score: a mark for each posterior's score on a line for its interval. {self.explained}"

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = []
        for panel in self.panels:
            for name, line in zip(self.names, panel.lines, strict=True):
                low, high = line.interval or (None, None)
                rows.append([" ".join(panel.title.split()), name, line.value, low, high])
        return FigureNumbers(["score", "posterior", "value", "low", "high"], rows)

    def draw(self) -> Figure:
        return draw_comparison(
            self.panels, self.names, title=self.title, marked=self.marked, plain=self.plain, tests=self.tests, most_columns=3,
            panel_width=2.3,
        )  # fmt: skip


_MOST_COLUMNS = 3
# They differ in shape, fill and dash as well as in colour.
_MARKED: dict[str, Any] = {"color": "#0072b2", "marker": "D", "markersize": 6.5}
_PLAIN: dict[str, Any] = {"color": "#b34700", "marker": "o", "markersize": 6.5, "markerfacecolor": "white"}


class Line(NamedTuple):
    """One posterior in one panel.

    Args:
        points: one per checkpoint, if there are several.
        value: the mean of the points, or the single value; None if undefined.
        interval: (low, high); None if unknown.
    """

    points: Sequence[float]
    value: float | None
    interval: tuple[float, float] | None
    is_marked: bool


class ScorePanel(NamedTuple):
    """One score: the label of its axis and one line per posterior."""

    title: str
    lines: Sequence[Line]


def draw_comparison(
    panels: Sequence[ScorePanel],
    names: Sequence[str],
    *,
    title: str,
    marked: str | None,
    plain: str,
    tests: str,
    zero: str | None = None,
    most_columns: int = _MOST_COLUMNS,
    panel_width: float = 2.8,
) -> Figure:
    """Draw the panels with a shared list of posteriors, top down, and a legend of the two marks.

    Args:
        names: posteriors, one per line of every panel.
        marked, plain: legend of filled diamonds and hollow circles; if None, all marks are diamonds without meaning.
        tests: test that the marks are based on.
        zero: legend of the line at 0, if the values are differences; None for no line.
        panel_width: inches.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / most_columns)
    columns = math.ceil(len(panels) / rows)
    height = 0.9 + 0.3 * len(names)
    figure = Figure(figsize=(1.6 + panel_width * columns, rows * height + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for place, axes in enumerate(grid.flatten()):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        for position, line in enumerate(panels[place].lines):
            _draw_line(axes, line, position)
        if zero is not None:
            axes.axvline(0, color=GREY, linewidth=0.9, linestyle=":")
        axes.set_xlabel(panels[place].title)
        axes.tick_params(axis="x", labelsize="small")
        axes.locator_params(axis="x", nbins=4)
        plain_axes(axes)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(title, fontsize="large")
    if marked is not None:
        _legend(figure, tests, [marked, plain], zero)
    return figure


def _draw_line(axes: Axes, line: Line, position: int) -> None:
    """Draw the mean on its interval, with the checkpoints as small dots below."""
    if line.value is None:
        axes.text(
            0.5, position, "undefined", transform=axes.get_yaxis_transform(), color=GREY, fontsize="small",
            ha="center", va="center",
        )  # fmt: skip
        return
    style = _MARKED if line.is_marked else _PLAIN
    if line.points:
        heights = [position + 0.27] * len(line.points)
        axes.plot(
            line.points, heights, linestyle="none", marker="o", markersize=3, color=style["color"], alpha=0.6, mew=0
        )
    if line.interval is not None:
        dash = "-" if line.is_marked else (0, (3, 1.5))
        axes.plot(line.interval, [position] * 2, color=style["color"], linewidth=1.6, linestyle=dash)
    axes.plot([line.value], [position], linestyle="none", **style)


def _legend(figure: Figure, tests: str, marks: Sequence[str], zero: str | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="-", linewidth=1.6, label=marks[0], **_MARKED),
        Line2D([], [], linestyle=(0, (3, 1.5)), linewidth=1.6, label=marks[1], **_PLAIN),
    ]
    if zero is not None:
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, linestyle=":", label=zero))
    figure.legend(
        handles=handles, title=tests, title_fontsize="small", loc="outside lower center", ncols=len(handles),
        frameon=False, fontsize="small",
    )  # fmt: skip
