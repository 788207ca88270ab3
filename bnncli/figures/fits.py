"""Figures of fits: prior precision search, training traces, measurements along a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures.style import GREY, PAGE_WIDTH, Cell, FigureNumbers, legend_of, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LABELS = {
    "val": "validation NLL (nats per example)",
    "loo": "leave-one-out NLL of train (nats per example)",
    "marglik": "minus log marginal likelihood (nats)",
}
EDGE_TEXT = "the best is at the edge of the range searched"
_TICKS = (1, 2, 3, 5, 7)
_NEAR = math.sqrt(10) * 1.001  # factor around the best that the halved steps cover
_CURVE, _CHOSEN, _NETWORK = "#1f4e79", "#c44601", "#5b5b5b"  # differ in lightness as well


@dataclass(frozen=True)
class PriorPrecisionCurve:
    """Curve of a prior precision search.

    Args:
        posterior: its name.
        curve, criterion, at_edge, network: as for `draw_prior_precision`.
        key: prefix of the figure's name.
    """

    posterior: str
    curve: Sequence[tuple[float, float]]
    criterion: str
    at_edge: bool
    network: float | None = None
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}prior-precision-{self.posterior}"

    @property
    def title(self) -> str:
        return f"Search for the prior precision of {self.posterior}"

    @property
    def description(self) -> str:
        best = min(self.curve, key=lambda point: point[1])
        return (
            "Each point is a prior precision that was tried (logarithmic axis); its height is the "
            f"{LABELS[self.criterion]}. The lowest was chosen: {best[0]:.4g}. To the left, weights are nearly "
            "free; to the right, they are held at zero. Below, the same near the best one, if there are enough "
            "points." + (f" {EDGE_TEXT.capitalize()}." if self.at_edge else "")
        )

    @property
    def numbers(self) -> FigureNumbers:
        return FigureNumbers(["prior precision", LABELS[self.criterion]], [list(point) for point in self.curve])

    def draw(self) -> Figure:
        return draw_prior_precision(
            self.curve, criterion=self.criterion, at_edge=self.at_edge, network=self.network, is_stacked=True
        )


def draw_prior_precision(
    curve: Sequence[tuple[float, float]],
    *,
    criterion: str,
    at_edge: bool,
    network: float | None = None,
    is_stacked: bool = False,
) -> Figure:
    """Draw all candidates and mark the lowest: the full range, and the half decade around the best.

    Args:
        curve: (prior precision, criterion), by increasing precision.
        criterion: val, loo or marglik.
        at_edge: whether to warn that the best lies at the edge.
        network: validation NLL of the trained network, nats per example, drawn as a line if given.
        is_stacked: whether to stack the two panels, in the width of one.
    """
    from matplotlib.figure import Figure

    best = min(curve, key=lambda point: point[1])
    near = [point for point in curve if best[0] / _NEAR <= point[0] <= best[0] * _NEAR]
    panels = [list(curve), near] if 3 <= len(near) < len(curve) else [list(curve)]
    rows, columns = (len(panels), 1) if is_stacked else (1, len(panels))
    figure = Figure(figsize=(4.8 * columns, (3.2 if is_stacked else 3.8) * rows), layout="constrained")
    for place, points in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw_points(axes, points, best)
        if network is not None:
            _draw_network(axes, network, is_labeled=place == 0)
        axes.set_xlabel("prior precision (1 / variance)" + ("" if place == 0 else ", near the best"))
        if place == 1:
            _label_plainly(axes)
        if place == 0 or is_stacked:
            axes.set_ylabel(LABELS[criterion])
        if place == 0:
            axes.legend(frameon=False, fontsize="small", loc="best")
    if at_edge:
        figure.supxlabel(f"Warning: {EDGE_TEXT}", color=_CHOSEN, fontsize="small")
    return figure


def _draw_points(axes: Axes, points: Sequence[tuple[float, float]], best: tuple[float, float]) -> None:
    precisions, values = zip(*points, strict=True)
    axes.set_xscale("log")
    axes.plot(precisions, values, color=_CURVE, linewidth=1, marker="o", markersize=4, label="candidates")
    label = f"chosen: {best[0]:.4g}, {best[1]:.6g}"
    axes.plot(*best, color=_CHOSEN, marker="D", markersize=8, linestyle="none", label=label, zorder=3)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _label_plainly(axes: Axes) -> None:
    """Label a narrow logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_network(axes: Axes, network: float, *, is_labeled: bool) -> None:
    """Draw a horizontal line, if it lies in or near the panel's range."""
    low, high = axes.get_ylim()
    if is_labeled or low - (high - low) <= network <= high + (high - low):
        label = f"network as trained: {network:.4f}" if is_labeled else None
        axes.axhline(network, color=_NETWORK, linewidth=1.2, linestyle="--", label=label)


_PANEL_HEIGHT = 2.3  # inches


class Series(NamedTuple):
    """A named line with an optional band (low, high) per point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


class LinePanel(NamedTuple):
    """Axes with lines. `zero` is a height and the label of its dotted line."""

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
        name, title, description: as in `Shown`.
        has_legend: whether panels with several lines have a legend.
    """

    name: str
    title: str
    description: str
    panels: Sequence[LinePanel]
    has_legend: bool = True

    @property
    def numbers(self) -> FigureNumbers:
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


class MeasuredLine(NamedTuple):
    """Values at x with their standard errors; None where unknown."""

    x: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float | None]


def draw_measured_lines(
    lines: Mapping[str, MeasuredLine], *, title: str, x_label: str, y_label: str, log: str = ""
) -> Figure:
    """Draw the lines in one panel.

    Args:
        log: logarithmic axes: x, y or xy.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, line) in enumerate(lines.items()):
        errors = [error or 0.0 for error in line.errors]
        axes.errorbar(
            line.x, line.values, yerr=errors, label=name, marker="o", markersize=4, capsize=2, **line_style(place)
        )
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize="large")
    plain_axes(axes)
    legend_of(axes, len(lines), "")
    return figure
