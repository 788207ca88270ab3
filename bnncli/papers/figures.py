"""Figures of published experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.figures.style import GREY, PALE, legend_of, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Published numbers beside ours: a panel for each column of a table, a line for each row, with standard errors and tolerances.

_OURS, _PUBLISHED = "#0072b2", "#b34700"
_MOST_PANELS = 3


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


def draw_agreement(panels: Sequence[tuple[str, Sequence[Pair]]], *, title: str) -> Figure:
    """Draw a panel for each column of a table, in rows of three."""
    from matplotlib.figure import Figure

    columns = min(_MOST_PANELS, len(panels))
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


# Measured numbers against something that was varied: a line for each name, with standard errors.


class MeasuredLine(NamedTuple):
    """Values at the places x, each with its standard error, or None where it is not known."""

    x: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float | None]


def draw_lines(lines: Mapping[str, MeasuredLine], *, title: str, x_label: str, y_label: str, log: str = "") -> Figure:
    """Draw the lines in one panel.

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


# Densities over three classes, on triangles: a row for each way of making them, a column for each distribution.

_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])


def draw_triangles(
    rows: Mapping[str, Sequence[NDArray[np.float64]]],
    columns: Sequence[str],
    points: NDArray[np.float64],
    *,
    title: str,
) -> Figure:
    """Draw triangles, each column on one scale, dark where there is nothing.

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


# Beta distributions and their Laplace approximations: in the standard basis, in the softmax basis, and that one transformed back.
#
# After figure 2.1 of Hobbhahn (2020), arXiv 2003.01227, and Hennig et al. (2012), Kernel topic models.

_TITLES = ("standard basis", "softmax basis", "softmax basis, transformed back")
_HIGHEST = 4.5  # of a density that is shown


class BetaCurves(NamedTuple):
    """A Beta: its name, and of each panel x, `own` and `approximation`, None where there is none."""

    name: str
    standard: Mapping[str, Any]
    softmax: Mapping[str, Any]
    back: Mapping[str, Any]


def draw_bases(curves: Sequence[BetaCurves]) -> Figure:
    """Draw three panels with the Betas as whole lines and their approximations dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    for place, axes in enumerate(figure.subplots(1, 3)):
        for number, one in enumerate(curves):
            color, panel = line_style(number)["color"], (one.standard, one.softmax, one.back)[place]
            axes.plot(panel["x"], panel["own"], color=color, linewidth=1.5, label=one.name)
            if panel["approximation"] is not None:
                label = f"{one.name}, Laplace"
                axes.plot(
                    panel["x"], panel["approximation"], color=color, linewidth=1.3, linestyle=(0, (4, 2)), label=label
                )
        axes.set_title(_TITLES[place], fontsize="medium")
        axes.set_xlabel("logit" if place == 1 else "probability")
        axes.set_ylim(0, None if place == 1 else _HIGHEST)
        plain_axes(axes)
    figure.axes[0].set_ylabel("density")
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False, fontsize="small")
    figure.suptitle("Laplace approximations of Beta distributions (dashed)", fontsize="large")
    return figure


# Draws of two parameters over a density that is known: a panel for each set of draws, black contours of the density in all.
#
# After figure 6 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.

# Contours hold these shares of the probability.
SHARES = (0.95, 0.8, 0.5, 0.2)
_CONTOUR_FILLS = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd")  # of the same shares, from pale to dark
_MOST_CONTOURS = 3


class ContourPanel(NamedTuple):
    """A title, and draws (S, 2)."""

    title: str
    draws: NDArray[np.float64]


def draw_contours(
    panels: Sequence[ContourPanel],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    density: NDArray[np.float64],
    *,
    title: str,
    names: tuple[str, str] = ("weight 1", "weight 2"),
) -> Figure:
    """Draw the panels in rows of three, on axes that show all but four thousandths of the density and most draws.

    Args:
        x, y: equidistant places of columns and rows.
        density: (rows, columns), in any unit.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(_MOST_CONTOURS, len(panels))
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
        place.contourf(grid_x, grid_y, smooth, levels=levels, colors=_CONTOUR_FILLS)
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
    shown: list[Any] = [Line2D([], [], color="black"), Patch(facecolor=_CONTOUR_FILLS[2])]
    held = ", ".join(f"{100 * share:.0f}" for share in SHARES)
    labels = [f"exact, holding {held}%", "kernel density of the draws, same levels"]
    figure.legend(shown, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="large")
    return figure


def kernel_density(draws: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimate the density of draws (S, 2) on a grid (rows of y, columns of x), with a Gaussian kernel and Scott's bandwidth."""
    from scipy.stats import gaussian_kde  # slow to import

    across, up = np.meshgrid(x, y)
    return np.asarray(gaussian_kde(draws.T)(np.stack([across.ravel(), up.ravel()]))).reshape(across.shape)


def contour_levels(density: NDArray[np.float64]) -> list[float]:
    """Return rising levels, above which lie SHARES of the sum of a density on a grid."""
    falling = np.sort(density.ravel())[::-1]
    held = np.cumsum(falling) / falling.sum()
    return [float(falling[np.searchsorted(held, share)]) for share in SHARES]


def _limits(
    places: NDArray[np.float64], density: NDArray[np.float64], draws: Sequence[NDArray[np.float64]]
) -> tuple[float, float]:
    """Return the limits of one axis: all but four thousandths of the density, and the middle 98 % of each set of draws."""
    held = np.cumsum(density) / density.sum()
    low, high = (float(places[np.searchsorted(held, share)]) for share in (0.002, 0.998))
    quantiles = [np.quantile(each, (0.01, 0.99)) for each in draws]
    low, high = min(low, *(pair[0] for pair in quantiles)), max(high, *(pair[1] for pair in quantiles))
    margin = 0.04 * (high - low)
    return low - margin, high + margin


# Functions of one input with their uncertainty: a panel for each, mean and two standard deviations, the examples in all.
#
# After figure 4 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.

_LINE, _BAND, _FAINT = "#0072b2", "#9ecae1", "#deebf7"


class BandPanel(NamedTuple):
    """A title, mean and standard deviation at every place."""

    title: str
    mean: NDArray[np.float64]
    sd: NDArray[np.float64]


def draw_bands(
    panels: Sequence[BandPanel],
    places: NDArray[np.float64],
    examples: tuple[NDArray[np.float64], NDArray[np.float64]],
    *,
    title: str,
) -> Figure:
    """Draw the panels side by side, on one scale that is cut where a band leaves three times the examples' range.

    Args:
        places: (M,), rising. examples: inputs and labels (N,) each.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(panels) + 0.4, 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for place, panel in zip(axes, panels, strict=True):
        for factor, color in ((2, _FAINT), (1, _BAND)):
            place.fill_between(places, panel.mean - factor * panel.sd, panel.mean + factor * panel.sd, color=color)
        place.plot(places, panel.mean, color=_LINE, linewidth=1.5)
        place.plot(*examples, marker="o", markersize=3, linestyle="none", color="black")
        place.set_title(panel.title, fontsize="medium")
        place.set_xlabel("input")
        plain_axes(place)
    middle, half = (examples[1].max() + examples[1].min()) / 2, (examples[1].max() - examples[1].min()) / 2
    reached = max(float((np.abs(panel.mean - middle) + 2 * panel.sd).max()) for panel in panels)
    axes[0].set_ylim(middle - min(reached, 3 * half), middle + min(reached, 3 * half))
    axes[0].set_ylabel("output")
    figure.suptitle(title, fontsize="large")
    return figure


# How confident classifiers of two inputs are over a square: a map for each, one colour scale, the examples in all.
#
# After figure 5 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.

_MARKERS = ("o", "s", "^", "D", "v", "P")
_LEVELS = (0.7, 0.9)


def draw_maps(
    maps: Mapping[str, NDArray[np.float64]],
    limit: float,
    examples: tuple[NDArray[np.float64], NDArray[np.int64]],
    *,
    title: str,
) -> Figure:
    """Draw the maps side by side, with contours at 0.7 and 0.9 and a marker for each class.

    Args:
        maps: title to confidence, (rows, columns), rows rising with the second input, from -limit to limit.
        examples: inputs (N, 2) and labels (N,).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.8 * len(maps) + 1.0, 3.2), layout="constrained")
    axes = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[0]
    inputs, labels = examples
    for place, (name, confidence) in zip(axes, maps.items(), strict=True):
        extent = (-limit, limit, -limit, limit)
        image = place.imshow(
            confidence,
            origin="lower",
            extent=extent,
            vmin=1 / (labels.max() + 1),
            vmax=1,
            cmap="Blues",
            interpolation="bilinear",
        )
        steps = np.linspace(-limit, limit, len(confidence))
        lines = place.contour(steps, steps, confidence, levels=_LEVELS, colors="#444444", linewidths=0.8)
        place.clabel(lines, fontsize="x-small")
        for label in np.unique(labels):
            place.plot(
                *inputs[labels == label].T, marker=_MARKERS[label % len(_MARKERS)], markersize=3.5, linestyle="none",
                color="#d55e00", markeredgecolor="white", markeredgewidth=0.4,
            )  # fmt: skip
        place.set_title(name, fontsize="medium")
        place.set_xlabel("input 1")
    axes[0].set_ylabel("input 2")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("confidence")
    figure.suptitle(title, fontsize="large")
    return figure


# Values over a plane of inputs, a panel for each way of making them, with the points that were trained on.

_MOST_PLANES = 4
_PLANE_MARKERS = ("o", "s", "^", "D")


class Plane(NamedTuple):
    """A panel: its title, values (rows from below, columns), and the largest of its scale, None for that of the values."""

    title: str
    values: NDArray[np.float64]
    largest: float | None


def draw_planes(
    planes: Sequence[Plane],
    *,
    limit: float,
    points: tuple[NDArray[np.float64], NDArray[np.int64]],
    title: str,
) -> Figure:
    """Draw the panels in rows of four, each with its own scale.

    Args:
        limit: the plane reaches from -limit to limit in both directions.
        points: places (N, 2) and classes (N,), marked by class.
    """
    from matplotlib.figure import Figure

    columns = min(_MOST_PLANES, len(planes))
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
    """Draw one panel and return its image, for the scale."""
    extent = (-limit, limit, -limit, limit)
    largest = plane.largest or float(plane.values.max())
    image = axes.imshow(plane.values, origin="lower", extent=extent, cmap="viridis", vmin=0, vmax=largest)
    places, classes = points
    for label in range(int(classes.max()) + 1):
        own = places[classes == label]
        axes.plot(
            own[:, 0], own[:, 1], linestyle="none", marker=_PLANE_MARKERS[label % len(_PLANE_MARKERS)], markersize=2.2,
            markerfacecolor="white", markeredgecolor="black", markeredgewidth=0.4,
        )  # fmt: skip
    axes.set_title(plane.title, fontsize="small")
    axes.tick_params(labelsize="x-small")
    plain_axes(axes)
    axes.grid(visible=False)
    return image


# Rows of small grey images, divided by a dashed line.

_SIZE = 0.46  # inches of an image
_EDGE = 2  # white pixels around each


def draw_rows(images: NDArray[np.uint8], *, after: int, title: str) -> Figure:
    """Draw the images, black on white.

    Args:
        images: (rows, columns, height, width).
        after: how many columns stand left of the line.
    """
    from matplotlib.figure import Figure

    rows, columns, _, _ = images.shape
    figure = Figure(figsize=(_SIZE * columns + 0.3, _SIZE * rows + 0.6), layout="constrained")
    axes = figure.add_subplot()
    framed = np.pad(images, ((0, 0), (0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE)))
    height, width = framed.shape[2:]
    axes.imshow(framed.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), cmap="gray_r", vmin=0, vmax=255)
    axes.axvline(after * width - 0.5, color="black", linewidth=1.0, linestyle="--")
    axes.set_axis_off()
    axes.set_title(title, fontsize="medium")
    return figure


# Where time goes: a bar for each way, of the parts that it takes, to scale, with their seconds in the legend.

_FILLS = (("#0072b2", ""), ("#d55e00", "///"), ("#009e73", "..."), ("#000000", "xxx"))


def draw_times(rows: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """Draw bars from the top down; parts of one name have the same filling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 1.3 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    for place, part in enumerate(parts):
        color, hatch = _FILLS[place % len(_FILLS)]
        lefts, widths, heights = [], [], []
        for height, row in enumerate(rows.values()):
            if part in row:
                lefts.append(sum(value for name, value in row.items() if parts.index(name) < place))
                widths.append(row[part])
                heights.append(height)
        label = f"{part}, {max(widths):.2g} s"
        axes.barh(heights, widths, left=lefts, height=0.6, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize="large")
    plain_axes(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure
