"""Values over a plane of inputs, a panel for each way of making them, with the points that were trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.figures.style import plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 4
_MARKERS = ("o", "s", "^", "D")


class Plane(NamedTuple):
    """A panel: its title, values (rows from below, columns), and the largest of its scale, None for that of the values."""

    title: str
    values: NDArray[np.float64]
    largest: float | None


def draw(
    planes: Sequence[Plane],
    *,
    limit: float,
    points: tuple[NDArray[np.float64], NDArray[np.int64]],
    title: str,
) -> Figure:
    """The panels in rows of four, each with its own scale.

    Args:
        limit: the plane reaches from -limit to limit in both directions.
        points: places (N, 2) and classes (N,), marked by class.
    """
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, len(planes))
    rows = math.ceil(len(planes) / columns)
    figure = Figure(figsize=(2.5 * columns + 0.4, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, plane in zip(grid.flat, planes, strict=False):
        image = _draw_plane(axes, plane, limit, points)
        bar = figure.colorbar(image, ax=axes, shrink=0.75, pad=0.02)
        bar.ax.tick_params(labelsize="x-small")
        bar.ax.locator_params(nbins=4)
    for axes in grid.flat[len(planes) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure


def _draw_plane(axes: Axes, plane: Plane, limit: float, points: tuple[NDArray[np.float64], NDArray[np.int64]]) -> Any:
    """One panel; its image, for the scale."""
    extent = (-limit, limit, -limit, limit)
    largest = plane.largest or float(plane.values.max())
    image = axes.imshow(plane.values, origin="lower", extent=extent, cmap="viridis", vmin=0, vmax=largest)
    places, classes = points
    for label in range(int(classes.max()) + 1):
        own = places[classes == label]
        axes.plot(
            own[:, 0], own[:, 1], linestyle="none", marker=_MARKERS[label % len(_MARKERS)], markersize=2.2,
            markerfacecolor="white", markeredgecolor="black", markeredgewidth=0.4,
        )  # fmt: skip
    axes.set_title(plane.title, fontsize="small")
    axes.tick_params(labelsize="x-small")
    plain_axes(axes)
    axes.grid(visible=False)
    return image
