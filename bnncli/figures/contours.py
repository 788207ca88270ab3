"""Draws of two parameters over a density that is known: a panel for each set of draws, black contours of the density in all.

After figure 6 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Contours hold these shares of the probability.
SHARES = (0.95, 0.8, 0.5, 0.2)
_FILLS = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd")  # of the same shares, from pale to dark
_MOST_COLUMNS = 3


class ContourPanel(NamedTuple):
    """A title, and draws (S, 2)."""

    title: str
    draws: NDArray[np.float64]


def draw(
    panels: Sequence[ContourPanel],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    density: NDArray[np.float64],
    *,
    title: str,
    names: tuple[str, str] = ("weight 1", "weight 2"),
) -> Figure:
    """The panels, in rows of up to three, on axes that show all but four thousandths of the density and of most draws.

    Args:
        x, y: equidistant places of columns and rows.
        density: (rows, columns), in any unit.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(_MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.6, 2.7 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    limits = [_limits(values, sums, [panel.draws[:, place] for panel in panels]) for place, (values, sums) in
              enumerate(((x, density.sum(axis=0)), (y, density.sum(axis=1))))]  # fmt: skip
    grid_x, grid_y = (np.linspace(*pair, 90) for pair in limits)
    for place, panel in zip(axes.flat, panels, strict=False):
        smooth = kernel_density(panel.draws, grid_x, grid_y)
        levels = [*contour_levels(smooth), 1.01 * float(smooth.max())]
        # By rank, not by height: the shares are equally spaced in colour, in all panels alike.
        place.contourf(grid_x, grid_y, smooth, levels=levels, colors=_FILLS)
        place.contour(x, y, density, levels=contour_levels(density), colors="black", linewidths=1.0)
        place.set_title(panel.title, fontsize="medium")
        place.set(xlim=limits[0], ylim=limits[1])
        place.spines[["top", "right"]].set_visible(False)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for number in range(len(panels)):
        row, column = divmod(number, columns)
        if number + columns >= len(panels):
            axes[row, column].set_xlabel(names[0])
            axes[row, column].tick_params(labelbottom=True)
        if column == 0:
            axes[row, column].set_ylabel(names[1])
    shown: list[Any] = [Line2D([], [], color="black"), Patch(facecolor=_FILLS[2])]
    held = ", ".join(f"{100 * share:.0f}" for share in SHARES)
    labels = [f"exact, holding {held}%", "kernel density of the draws, same levels"]
    figure.legend(shown, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="large")
    return figure


def kernel_density(draws: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """A Gaussian kernel density of draws (S, 2), bandwidth by Scott's rule, on the grid (rows of y, columns of x)."""
    from scipy.stats import gaussian_kde  # slow to import

    across, up = np.meshgrid(x, y)
    return np.asarray(gaussian_kde(draws.T)(np.stack([across.ravel(), up.ravel()]))).reshape(across.shape)


def contour_levels(density: NDArray[np.float64]) -> list[float]:
    """Rising levels above which lie SHARES of what the density on a grid sums to."""
    falling = np.sort(density.ravel())[::-1]
    held = np.cumsum(falling) / falling.sum()
    return [float(falling[np.searchsorted(held, share)]) for share in SHARES]


def _limits(
    places: NDArray[np.float64], density: NDArray[np.float64], draws: Sequence[NDArray[np.float64]]
) -> tuple[float, float]:
    """Of one axis: all but four thousandths of the density, and the middle 98 % of each set of draws."""
    held = np.cumsum(density) / density.sum()
    low, high = (float(places[np.searchsorted(held, share)]) for share in (0.002, 0.998))
    quantiles = [np.quantile(each, (0.01, 0.99)) for each in draws]
    low, high = min(low, *(pair[0] for pair in quantiles)), max(high, *(pair[1] for pair in quantiles))
    margin = 0.04 * (high - low)
    return low - margin, high + margin
