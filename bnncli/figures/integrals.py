"""Absolute errors of integrators over mean and standard deviation of a logit: a panel for each, one colour scale.

After figure 2 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041; the scale is logarithmic here, since the
errors differ by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST = 1e-5  # errors below it are white
_MOST_COLUMNS = 4
_MARK = "#d62728"


class ErrorPanel(NamedTuple):
    """An integrator: its names (those that err alike share one), absolute errors (sds, means), and (mean, sd) of the largest."""

    names: Sequence[str]
    errors: NDArray[np.float64]
    worst: tuple[float, float]


def draw(panels: Sequence[ErrorPanel], means: NDArray[np.float64], sds: NDArray[np.float64], *, title: str) -> Figure:
    """Error maps in rows of up to four, the largest error of each marked.

    Args:
        means, sds: of the grid's columns and rows, equidistant.
        title: says what the errors are measured against, and how many draws were made.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    largest = max(float(panel.errors.max()) for panel in panels)
    norm = LogNorm(_LEAST, max(largest, 10 * _LEAST))
    columns = min(_MOST_COLUMNS, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.7 * columns + 1.0, 2.5 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    image: Any = None
    for place, panel in zip(axes.flat, panels, strict=False):
        image = _draw_panel(place, panel, means, sds, norm)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for number in range(len(panels)):
        row, column = divmod(number, columns)
        if number + columns >= len(panels):
            axes[row, column].set_xlabel("mean of the logit")
            axes[row, column].tick_params(labelbottom=True)
        if column == 0:
            axes[row, column].set_ylabel("standard deviation")
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 1.6 / rows + 0.2), pad=0.015, extend="min")
    bar.set_label("absolute error of the probability")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: ErrorPanel, means: NDArray[np.float64], sds: NDArray[np.float64], norm: Any) -> Any:
    """One error map; the image, for the colour bar."""
    from matplotlib import colormaps

    colors = colormaps["viridis_r"].with_extremes(under="white")
    step_x, step_y = means[1] - means[0], sds[1] - sds[0]
    extent = (means[0] - step_x / 2, means[-1] + step_x / 2, sds[0] - step_y / 2, sds[-1] + step_y / 2)
    # Zero is below the scale, as all that is white.
    shown = np.maximum(panel.errors, _LEAST / 10)
    image = axes.imshow(
        shown, origin="lower", extent=extent, aspect="auto", norm=norm, cmap=colors, interpolation="nearest"
    )
    if panel.errors.max() >= _LEAST:
        axes.plot(*panel.worst, marker="o", color=_MARK, markeredgecolor="white", markersize=6, linestyle="none")
    name = " = ".join(panel.names)
    axes.set_title(f"{name}\nlargest {panel.errors.max():.2g}, mean {panel.errors.mean():.2g}", fontsize="small")
    return image
