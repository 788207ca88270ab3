"""Absolute errors of integrators by mean and standard deviation of a logit, one panel each with a common colour scale.

After figure 2 of Kristiadi, Eschenhagen and Hennig (2022), arXiv:2205.10041, but with a logarithmic scale, since the
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

_LEAST = 1e-5  # smaller errors are white
_MOST_COLUMNS = 4
_MARK = "#d62728"


class ErrorPanel(NamedTuple):
    """Names of integrators with equal errors, absolute errors (sds, means), and (mean, sd) of the largest error."""

    names: Sequence[str]
    errors: NDArray[np.float64]
    worst: tuple[float, float]


def draw(panels: Sequence[ErrorPanel], means: NDArray[np.float64], sds: NDArray[np.float64], *, title: str) -> Figure:
    """Draw error maps in rows of up to four, with the largest error of each marked.

    Args:
        means, sds: equidistant columns and rows of the grid.
        title: states the reference and the number of draws.
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
    """Draw one error map and return the image, for the colour bar."""
    from matplotlib import colormaps

    colors = colormaps["viridis_r"].with_extremes(under="white")
    step_x, step_y = means[1] - means[0], sds[1] - sds[0]
    extent = (means[0] - step_x / 2, means[-1] + step_x / 2, sds[0] - step_y / 2, sds[-1] + step_y / 2)
    # Zero has no logarithm: draw it below the scale, in white.
    shown = np.maximum(panel.errors, _LEAST / 10)
    image = axes.imshow(
        shown, origin="lower", extent=extent, aspect="auto", norm=norm, cmap=colors, interpolation="nearest"
    )
    if panel.errors.max() >= _LEAST:
        axes.plot(*panel.worst, marker="o", color=_MARK, markeredgecolor="white", markersize=6, linestyle="none")
    name = " = ".join(panel.names)
    axes.set_title(f"{name}\nlargest {panel.errors.max():.2g}, mean {panel.errors.mean():.2g}", fontsize="small")
    return image
