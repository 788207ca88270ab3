"""Lines over a common kind of axis, panels above each other: traces of fits, and whatever else has series of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures._lines import legend_of, line_style, plain_axes
from bnncli.figures.inks import GREY
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_HEIGHT = 2.3  # inches


class Series(NamedTuple):
    """A line: its name, and as many x as y. band: (low, high) of each point, around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


class LinePanel(NamedTuple):
    """Lines on axes of their own. zero: a height that is marked by a dotted line, with its name."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_x_logarithmic: bool = False
    is_y_logarithmic: bool = False
    zero: tuple[float, str] | None = None


@dataclass(frozen=True)
class LinePanels:
    """Panels of lines.

    Args:
        name, title, description: as Shown has them.
        has_legend: whether lines are named in the panels that have several.
    """

    name: str
    title: str
    description: str
    panels: Sequence[LinePanel]
    has_legend: bool = True

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each point of each line."""
        has_band = any(series.band is not None for panel in self.panels for series in panel.series)
        rows: list[list[Cell]] = []
        for panel in self.panels:
            for series in panel.series:
                nothing: Sequence[float | None] = [None] * len(series.x)
                columns = [series.x, series.y, *((series.band or (nothing, nothing)) if has_band else ())]
                rows += [[panel.title, series.name, *point] for point in zip(*columns, strict=True)]
        axes = [self.panels[0].x_label, self.panels[0].y_label] if self.panels else ["x", "y"]
        return FigureNumbers(["panel", "line", *axes, *(["low", "high"] if has_band else [])], rows)

    def draw(self) -> Figure:
        """The panels, above each other."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(PAGE_WIDTH, _PANEL_HEIGHT * len(self.panels) + 0.2), layout="constrained")
        for axes, panel in zip(figure.subplots(len(self.panels), 1, squeeze=False).flatten(), self.panels, strict=True):
            _draw_panel(axes, panel)
            if self.has_legend and len(panel.series) > 1:
                legend_of(axes, len(panel.series), "")
        return figure


def _draw_panel(axes: Axes, panel: LinePanel) -> None:
    for place, series in enumerate(panel.series):
        style = line_style(place)
        if series.band is not None:
            axes.fill_between(series.x, *series.band, color=style["color"], alpha=0.18, linewidth=0)
        marker = "o" if len(series.x) == 1 else None
        axes.plot(series.x, series.y, label=series.name, marker=marker, markersize=3, **style)
    if panel.zero is not None:
        height, label = panel.zero
        axes.axhline(height, color=GREY, linewidth=0.9, linestyle=":", label=label)
    if panel.is_x_logarithmic:
        axes.set_xscale("log")
    elif all(float(x).is_integer() for series in panel.series for x in series.x):
        axes.locator_params(axis="x", integer=True)
    if panel.is_y_logarithmic:
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize="medium", parse_math=False)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.ticklabel_format(axis="y", useOffset=False) if not panel.is_y_logarithmic else None
    plain_axes(axes)
