"""Densities over three classes, on triangles: a row for each way of making them, a column for each distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])


def draw(
    rows: Mapping[str, Sequence[NDArray[np.float64]]],
    columns: Sequence[str],
    points: NDArray[np.float64],
    *,
    title: str,
) -> Figure:
    """Triangles whose columns have a common scale each, dark where nothing is.

    Args:
        rows: name to the values (n,) of each column, at the points.
        points: (n, 3), on the simplex, corners among them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.1 * len(columns) + 0.8, 1.9 * len(rows) + 0.7), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    largest = [max(float(values[place].max()) for values in rows.values()) for place in range(len(columns))]
    for line, (name, values) in zip(grid, rows.items(), strict=True):
        for place, axes in enumerate(line):
            _draw_triangle(axes, values[place], points, largest[place])
        line[0].set_ylabel(name, fontsize="small")
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(column, fontsize="small")
    figure.suptitle(title, fontsize="large")
    return figure


def _draw_triangle(axes: Axes, values: NDArray[np.float64], points: NDArray[np.float64], largest: float) -> None:
    places = (points / points.sum(axis=1, keepdims=True)) @ _CORNERS
    axes.tripcolor(places[:, 0], places[:, 1], values, shading="gouraud", cmap="viridis", vmin=0, vmax=largest)
    for number, (x, y) in enumerate(_CORNERS, start=1):
        height = -0.07 if y == 0 else 0.05
        axes.text(x, y + height, str(number), fontsize="x-small", ha="center", va="center")
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.13, 0.98)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
