"""Figures of published experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.comparison import Estimate
from bnncli.figures.fits import MeasuredLine
from bnncli.figures.style import GREY, PALE, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Floats = NDArray[np.float64]
_Examples = tuple[_Floats, NDArray[np.int64]]  # inputs (N, 2) and labels (N,)
_OURS, _PUBLISHED = "#0072b2", "#b34700"
_MARKERS = ("o", "s", "^", "D", "v", "P")


def _make_figure(
    width: float, height: float, title: str, *, rows: int, columns: int, is_shared: bool = False
) -> tuple[Figure, Any]:
    """Return a figure of so many inches, and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="large")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=is_shared, sharey=is_shared)


def _make_panels(count: int, most: int, width: float, height: float, margin: tuple[float, float], title: str,
                 is_shared: bool = False) -> tuple[Figure, Any]:  # fmt: skip
    """Return a figure and the axes of its panels, in rows of at most so many; those of the last row that stay empty are hidden."""
    columns = min(most, count)
    rows = math.ceil(count / columns)
    size = width * columns + margin[0], height * rows + margin[1]
    figure, axes = _make_figure(*size, title, rows=rows, columns=columns, is_shared=is_shared)
    for place in axes.flat[count:]:
        place.set_visible(False)
    return figure, axes


def build_line(points: Mapping[float, Estimate]) -> MeasuredLine:
    """Return a line of estimates by their places."""
    return MeasuredLine(
        [*points], [one.value for one in points.values()], [one.standard_error for one in points.values()]
    )


class Pair(NamedTuple):
    """A row of a panel: its name, the published number, ours (None where it was not measured), and what they may differ by."""

    name: str
    published: Estimate
    ours: Estimate | None
    tolerance: float


def draw_agreement(panels: Sequence[tuple[str, Sequence[Pair]]], *, title: str) -> Figure:
    """Draw published numbers beside ours with standard errors and tolerances: a panel for each column of a table, in rows of three."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most = max(len(pairs) for _, pairs in panels)
    figure, grid = _make_panels(len(panels), 3, 3.3, 1.0 + 0.32 * most, (1.4, 0.7), title)
    for axes, (name, pairs) in zip(grid.flat, panels, strict=False):
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
    handles = [
        Line2D([], [], color=_PUBLISHED, marker="o", markerfacecolor="white", linestyle="none", label="published"),
        Line2D([], [], color=_OURS, marker="D", linestyle="none", label="ours"),
        Patch(facecolor=PALE, edgecolor=GREY, linewidth=0, label="tolerance around the published value"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def _draw_point(axes: Axes, point: Estimate, height: float, *, color: str, marker: str, face: str) -> None:
    axes.errorbar(
        point.value, height, xerr=point.standard_error or None, color=color, marker=marker, markersize=5.5,
        markerfacecolor=face, linestyle="none", capsize=2, elinewidth=1.2,
    )  # fmt: skip


# Densities over three classes, on triangles.

_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])


def draw_triangles(
    rows: Mapping[str, Sequence[_Floats]], columns: Sequence[str], points: _Floats, *, title: str
) -> Figure:
    """Draw triangles, a row for each way of making the densities, a column for each distribution, on one scale by column.

    Args:
        rows: name to the values (n,) of each column, at the points.
        points: (n, 3), on the simplex, corners among them.
    """
    size = 2.1 * len(columns) + 0.8, 1.9 * len(rows) + 0.7
    figure, grid = _make_figure(*size, title, rows=len(rows), columns=len(columns))
    places = (points / points.sum(axis=1, keepdims=True)) @ _CORNERS
    largest = [max(float(values[place].max()) for values in rows.values()) for place in range(len(columns))]
    for line, (name, values) in zip(grid, rows.items(), strict=True):
        for axes, each, top in zip(line, values, largest, strict=True):
            axes.tripcolor(*places.T, each, shading="gouraud", cmap="viridis", vmin=0, vmax=top)
            for number, (x, y) in enumerate(_CORNERS, start=1):
                axes.text(x, y + (-0.07 if y == 0 else 0.05), str(number), fontsize="x-small", ha="center", va="center")
            axes.set(xlim=(-0.08, 1.08), ylim=(-0.13, 0.98), aspect="equal", xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name, fontsize="small")
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(column, fontsize="small")
    return figure


# Beta distributions and their Laplace approximations: in the standard basis, in the softmax basis, and that one transformed back.
#
# After figure 2.1 of Hobbhahn (2020), arXiv 2003.01227, and Hennig et al. (2012), Kernel topic models.

_TITLES = ("standard basis", "softmax basis", "softmax basis, transformed back")
_HIGHEST = 4.5  # of a density that is shown


def draw_bases(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw three panels with the Betas as whole lines and their approximations, None where there is none, dashed.

    Each panel of a Beta has x, `own` and `approximation`.
    """
    title = "Laplace approximations of Beta distributions (dashed)"
    figure, (panels,) = _make_figure(10.5, 3.4, title, rows=1, columns=3)
    for place, axes in enumerate(panels):
        for number, (name, bases) in enumerate(curves.items()):
            color, panel = line_style(number)["color"], bases[place]
            axes.plot(panel["x"], panel["own"], color=color, linewidth=1.5, label=name)
            if panel["approximation"] is not None:
                style = {"color": color, "linewidth": 1.3, "linestyle": (0, (4, 2)), "label": f"{name}, Laplace"}
                axes.plot(panel["x"], panel["approximation"], **style)
        axes.set_title(_TITLES[place], fontsize="medium")
        axes.set_xlabel("logit" if place == 1 else "probability")
        axes.set_ylim(0, None if place == 1 else _HIGHEST)
        plain_axes(axes)
    panels[0].set_ylabel("density")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False, fontsize="small")
    return figure


# Draws of two parameters over a density that is known: a panel for each set of draws, black contours of the density in all.
#
# After figure 6 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.

SHARES = (0.95, 0.8, 0.5, 0.2)  # of the probability, which contours hold
_CONTOUR_FILLS = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd")  # of the same shares, from pale to dark


def draw_contours(panels: Mapping[str, _Floats], x: _Floats, y: _Floats, density: _Floats, *, title: str) -> Figure:
    """Draw the panels in rows of three, on axes that show all but four thousandths of the density and most draws.

    Args:
        panels: title to draws (S, 2).
        x, y: equidistant places of columns and rows.
        density: (rows, columns), in any unit.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, axes = _make_panels(len(panels), 3, 2.7, 2.7, (0.6, 0.9), title, is_shared=True)
    limits = [
        _limits(values, sums, [draws[:, place] for draws in panels.values()])
        for place, (values, sums) in enumerate(((x, density.sum(axis=0)), (y, density.sum(axis=1))))
    ]
    grid_x, grid_y = (np.linspace(*pair, 90) for pair in limits)
    for number, (place, (name, draws)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        smooth = kernel_density(draws, grid_x, grid_y)
        levels = [*contour_levels(smooth), 1.01 * float(smooth.max())]
        # By rank, not by height: the shares are equally spaced in colour, in all panels alike.
        place.contourf(grid_x, grid_y, smooth, levels=levels, colors=_CONTOUR_FILLS)
        place.contour(x, y, density, levels=contour_levels(density), colors="black", linewidths=1.0)
        place.set_title(name, fontsize="medium")
        place.set(xlim=limits[0], ylim=limits[1])
        place.spines[["top", "right"]].set_visible(False)
        if number + axes.shape[1] >= len(panels):
            place.set_xlabel("weight 1")
            place.tick_params(labelbottom=True)
        if number % axes.shape[1] == 0:
            place.set_ylabel("weight 2")
    shown: list[Any] = [Line2D([], [], color="black"), Patch(facecolor=_CONTOUR_FILLS[2])]
    held = ", ".join(f"{100 * share:.0f}" for share in SHARES)
    labels = [f"exact, holding {held}%", "kernel density of the draws, same levels"]
    figure.legend(shown, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


def kernel_density(draws: _Floats, x: _Floats, y: _Floats) -> _Floats:
    """Estimate the density of draws (S, 2) on a grid (rows of y, columns of x), with a Gaussian kernel and Scott's bandwidth."""
    from scipy.stats import gaussian_kde  # slow to import

    across, up = np.meshgrid(x, y)
    return np.asarray(gaussian_kde(draws.T)(np.stack([across.ravel(), up.ravel()]))).reshape(across.shape)


def contour_levels(density: _Floats) -> list[float]:
    """Return rising levels, above which lie SHARES of the sum of a density on a grid."""
    falling = np.sort(density.ravel())[::-1]
    held = np.cumsum(falling) / falling.sum()
    return [float(falling[np.searchsorted(held, share)]) for share in SHARES]


def _limits(places: _Floats, density: _Floats, draws: Sequence[_Floats]) -> tuple[float, float]:
    """Return the limits of one axis: all but four thousandths of the density, and the middle 98 % of each set of draws."""
    held = np.cumsum(density) / density.sum()
    low, high = (float(places[np.searchsorted(held, share)]) for share in (0.002, 0.998))
    quantiles = [np.quantile(each, (0.01, 0.99)) for each in draws]
    low, high = min(low, *(pair[0] for pair in quantiles)), max(high, *(pair[1] for pair in quantiles))
    margin = 0.04 * (high - low)
    return low - margin, high + margin


# Functions of one input, confidence over a square, and other values over a plane, with the examples in all panels.
#
# After figures 4 and 5 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.


def draw_bands(
    panels: Mapping[str, tuple[_Floats, _Floats]], places: _Floats, examples: tuple[_Floats, _Floats], *, title: str
) -> Figure:
    """Draw mean and two standard deviations side by side, on one scale that is cut where a band leaves three times the examples' range.

    Args:
        panels: title to mean and standard deviation at every place.
        places: (M,), rising. examples: inputs and labels (N,) each.
    """
    count = len(panels)
    figure, (axes,) = _make_figure(2.9 * count + 0.4, 3.0, title, rows=1, columns=count, is_shared=True)
    for place, (name, (mean, sd)) in zip(axes, panels.items(), strict=True):
        for factor, color in ((2, "#deebf7"), (1, "#9ecae1")):
            place.fill_between(places, mean - factor * sd, mean + factor * sd, color=color)
        place.plot(places, mean, color=_OURS, linewidth=1.5)
        place.plot(*examples, marker="o", markersize=3, linestyle="none", color="black")
        place.set_title(name, fontsize="medium")
        place.set_xlabel("input")
        plain_axes(place)
    middle, half = (examples[1].max() + examples[1].min()) / 2, (examples[1].max() - examples[1].min()) / 2
    reached = max(float((np.abs(mean - middle) + 2 * sd).max()) for mean, sd in panels.values())
    axes[0].set_ylim(middle - min(reached, 3 * half), middle + min(reached, 3 * half))
    axes[0].set_ylabel("output")
    return figure


def _mark_examples(axes: Axes, examples: _Examples, **style: Any) -> None:
    """Mark examples by class."""
    inputs, labels = examples
    for label in np.unique(labels):
        marker = _MARKERS[label % len(_MARKERS)]
        axes.plot(*inputs[labels == label].T, marker=marker, linestyle="none", markeredgewidth=0.4, **style)


def draw_maps(maps: Mapping[str, _Floats], limit: float, examples: _Examples, *, title: str) -> Figure:
    """Draw confidence over a square side by side on one colour scale, with contours at 0.7 and 0.9.

    Args:
        maps: title to confidence, (rows, columns), rows rising with the second input, from -limit to limit.
    """
    count = len(maps)
    figure, (axes,) = _make_figure(2.8 * count + 1.0, 3.2, title, rows=1, columns=count, is_shared=True)
    scale: dict[str, Any] = {
        "vmin": 1 / (examples[1].max() + 1),
        "vmax": 1,
        "cmap": "Blues",
        "interpolation": "bilinear",
    }
    for place, (name, confidence) in zip(axes, maps.items(), strict=True):
        image = place.imshow(confidence, origin="lower", extent=(-limit, limit) * 2, **scale)
        steps = np.linspace(-limit, limit, len(confidence))
        lines = place.contour(steps, steps, confidence, levels=(0.7, 0.9), colors="#444444", linewidths=0.8)
        place.clabel(lines, fontsize="x-small")
        _mark_examples(place, examples, markersize=3.5, color="#d55e00", markeredgecolor="white")
        place.set_title(name, fontsize="medium")
        place.set_xlabel("input 1")
    axes[0].set_ylabel("input 2")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("confidence")
    return figure


def draw_planes(
    planes: Mapping[str, tuple[_Floats, float | None]], *, limit: float, points: _Examples, title: str
) -> Figure:
    """Draw values over a plane of inputs, in rows of four panels, each with its own scale.

    Args:
        planes: title to values (rows from below, columns), and the largest of the scale, None for that of the values.
        limit: the plane reaches from -limit to limit in both directions.
    """
    figure, grid = _make_panels(len(planes), 4, 2.5, 2.6, (0.4, 0.4), title, is_shared=True)
    for axes, (name, (values, largest)) in zip(grid.flat, planes.items(), strict=False):
        scale = {"cmap": "viridis", "vmin": 0, "vmax": largest or float(values.max())}
        image = axes.imshow(values, origin="lower", extent=(-limit, limit) * 2, **scale)
        _mark_examples(axes, points, markersize=2.2, markerfacecolor="white", markeredgecolor="black")
        axes.set_title(name, fontsize="small")
        axes.tick_params(labelsize="x-small")
        plain_axes(axes)
        axes.grid(visible=False)
        bar = figure.colorbar(image, ax=axes, shrink=0.75, pad=0.02)
        bar.ax.tick_params(labelsize="x-small")
        bar.ax.locator_params(nbins=4)
    return figure


_SIZE = 0.46  # inches of an image
_EDGE = 2  # white pixels around each


def draw_rows(images: NDArray[np.uint8], *, after: int, title: str) -> Figure:
    """Draw small images (rows, columns, height, width), black on white, with a dashed line after so many columns."""
    rows, columns, _, _ = images.shape
    figure, ((axes,),) = _make_figure(_SIZE * columns + 0.3, _SIZE * rows + 0.6, "", rows=1, columns=1)
    framed = np.pad(images, ((0, 0), (0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE)))
    height, width = framed.shape[2:]
    axes.imshow(framed.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), cmap="gray_r", vmin=0, vmax=255)
    axes.axvline(after * width - 0.5, color="black", linewidth=1.0, linestyle="--")
    axes.set_axis_off()
    axes.set_title(title, fontsize="medium")
    return figure


_FILLS = (("#0072b2", ""), ("#d55e00", "///"), ("#009e73", "..."), ("#000000", "xxx"))


def draw_times(rows: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """Draw where time goes: a bar for each way from the top down, of the parts that it takes, to scale; seconds are in the legend."""
    figure, ((axes,),) = _make_figure(7.4, 1.3 + 0.6 * len(rows), "", rows=1, columns=1)
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    for place, part in enumerate(parts):
        color, hatch = _FILLS[place % len(_FILLS)]
        heights = [height for height, row in enumerate(rows.values()) if part in row]
        widths = [row[part] for row in rows.values() if part in row]
        lefts = [sum(row.get(one, 0.0) for one in parts[:place]) for row in rows.values() if part in row]
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
