"""Measured numbers against something that was varied: a line for each name, with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures._lines import legend_of, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MeasuredLine(NamedTuple):
    """Values at the places x, each with its standard error, or None where it is not known."""

    x: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float | None]


def draw(lines: Mapping[str, MeasuredLine], *, title: str, x_label: str, y_label: str, log: str = "") -> Figure:
    """The lines in one panel.

    Args:
        log: the axes that are logarithmic: x, y or xy.
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
