"""Published numbers beside ours: a panel for each column of a table, a line for each row, with standard errors and tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures.style import GREY, PALE, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _PUBLISHED = "#0072b2", "#b34700"
_MOST_COLUMNS = 3


class MarkedNumber(NamedTuple):
    """One number: value, standard error (None where it is not known)."""

    value: float
    standard_error: float | None


class Pair(NamedTuple):
    """A row of a panel: its name, the published number, ours (None where it was not measured), and what they may differ by."""

    name: str
    published: MarkedNumber
    ours: MarkedNumber | None
    tolerance: float


def draw(panels: Sequence[tuple[str, Sequence[Pair]]], *, title: str) -> Figure:
    """The panels, each with a title, from the top down as the rows come."""
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    most = max(len(pairs) for _, pairs in panels)
    figure = Figure(figsize=(1.4 + 3.3 * columns, rows * (1.0 + 0.32 * most) + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        _draw_panel(axes, *panels[place])
    figure.suptitle(title, fontsize="large")
    _legend(figure)
    return figure


def _draw_panel(axes: Axes, name: str, pairs: Sequence[Pair]) -> None:
    for position, pair in enumerate(pairs):
        low, width = pair.published.value - pair.tolerance, 2 * pair.tolerance
        axes.barh(position, width, left=low, height=0.7, color=PALE, linewidth=0)
        _draw_point(axes, pair.published, position - 0.14, color=_PUBLISHED, marker="o", face="white")
        if pair.ours is not None:
            _draw_point(axes, pair.ours, position + 0.14, color=_OURS, marker="D", face=_OURS)
    axes.set_yticks(range(len(pairs)), [pair.name for pair in pairs], fontsize="small")
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_title(name, fontsize="medium")
    axes.tick_params(axis="x", labelsize="small")
    axes.locator_params(axis="x", nbins=5)
    plain_axes(axes)
    axes.grid(visible=False, axis="y")


def _draw_point(axes: Axes, point: MarkedNumber, height: float, *, color: str, marker: str, face: str) -> None:
    axes.errorbar(
        point.value, height, xerr=point.standard_error or None, color=color, marker=marker, markersize=5.5,
        markerfacecolor=face, linestyle="none", capsize=2, elinewidth=1.2,
    )  # fmt: skip


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=_PUBLISHED, marker="o", markerfacecolor="white", linestyle="none", label="published"),
        Line2D([], [], color=_OURS, marker="D", linestyle="none", label="ours"),
        Patch(facecolor=PALE, edgecolor=GREY, linewidth=0, label="tolerance around the published value"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
