"""Figures of posteriors: importance weights, marginal densities, pruning, distances between posteriors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.figures.style import (
    BLUE,
    GREY,
    INK,
    PAGE_WIDTH,
    PALE,
    VERMILION,
    Cell,
    FigureNumbers,
    line_style,
    plain_axes,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_GOOD: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 7}
_BAD: dict[str, Any] = {"color": VERMILION, "marker": "X", "markersize": 8}


class Weights(NamedTuple):
    """Pareto k of one posterior's importance weights, its threshold, and the log weights' standard deviation in nats."""

    name: str
    pareto_k: float | None
    threshold: float
    log_weight_sd: float | None


@dataclass(frozen=True)
class WeightSpread:
    """Importance weight diagnostics of posteriors with a density.

    Args:
        weights: one per posterior.
        good_sd: largest good standard deviation of the log weights, nats.
        key: prefix of the figure's name.
    """

    weights: Sequence[Weights]
    good_sd: float
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}pareto-k"

    @property
    def title(self) -> str:
        return "Pareto k and spread of importance weights"

    @property
    def description(self) -> str:
        return (
            "Draws of each posterior are weighted by the density ratio of the exact posterior. Pareto k "
            "measures the tail of these weights, the standard deviation of their logarithm their spread. "
            f"Circles, left of the dotted lines (k below its threshold, spread at most {self.good_sd:g} nats), "
            "match the exact posterior closely; crosses do not."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [[one.name, one.pareto_k, one.threshold, one.log_weight_sd] for one in self.weights]
        return FigureNumbers(["posterior", "Pareto k", "threshold", "sd of log weights, nats"], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(PAGE_WIDTH, 0.32 * len(self.weights) + 0.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, one in enumerate(self.weights):
            _mark(left, one.pareto_k, place, one.threshold)
            left.plot([one.threshold] * 2, [place - 0.5, place + 0.5], color=VERMILION, linewidth=1.2, linestyle=":")
            _mark(right, one.log_weight_sd, place, self.good_sd)
        right.axvline(self.good_sd, color=VERMILION, linewidth=1.2, linestyle=":")
        right.set_xscale("log")
        spreads = [one.log_weight_sd for one in self.weights if one.log_weight_sd]
        right.set_xlim(min([0.1, *(0.7 * one for one in spreads)]), max([10.0, *(1.5 * one for one in spreads)]))
        left.set_xlabel("Pareto k")
        right.set_xlabel("sd of log weights, nats")
        left.set_yticks(range(len(self.weights)), [one.name for one in self.weights])
        left.set_ylim(len(self.weights) - 0.5, -0.5)
        for axes in (left, right):
            plain_axes(axes)
            axes.tick_params(labelsize="small")
            axes.tick_params(axis="y", length=0)
        return figure


def _mark(axes: Axes, value: float | None, place: int, limit: float) -> None:
    """Mark a value as good or bad; draw nothing for None."""
    if value is not None:
        axes.plot([value], [place], linestyle="none", clip_on=False, zorder=3, **(_GOOD if value <= limit else _BAD))


_COLUMNS = 2


class Marginal(NamedTuple):
    """One weight: its title, grid (G,), density (G,) per posterior, and values of point posteriors."""

    title: str
    grid: Sequence[float]
    densities: Mapping[str, Sequence[float]]
    points: Mapping[str, float]


@dataclass(frozen=True)
class Marginals:
    """Marginal densities of weights.

    Args:
        marginals: one per panel; each includes the reference.
        reference: posterior to compare with; None if there is none.
        chosen: sentence on how the weights were chosen.
        is_reference_good: whether the reference is reliable.
        key: prefix of the figure's name.
    """

    marginals: Sequence[Marginal]
    reference: str | None
    chosen: str
    is_reference_good: bool = True
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}marginals"

    @property
    def title(self) -> str:
        return "Densities of single weights" + (f", over those of {self.reference}" if self.reference else "")

    @property
    def description(self) -> str:
        role = (
            "which the others should match"
            if self.is_reference_good
            else "which has not converged and is only a rough guide"
        )
        filled = f" Grey: {self.reference}, {role}." if self.reference else ""
        points = " Vertical lines: posteriors with a single value." if any(one.points for one in self.marginals) else ""
        return (
            f"Densities of single weights under each posterior, estimated from its draws.{filled}{points} {self.chosen}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        names = list(dict.fromkeys(name for one in self.marginals for name in one.densities))
        rows: list[list[Cell]] = []
        for one in self.marginals:
            for place, value in enumerate(one.grid):
                rows.append(
                    [one.title, value, *(one.densities[n][place] if n in one.densities else None for n in names)]
                )
            rows += [[f"{one.title}, {name}", value, *[None] * len(names)] for name, value in one.points.items()]
        return FigureNumbers(["weight", "value", *names], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        rows = math.ceil(len(self.marginals) / _COLUMNS)
        columns = min(_COLUMNS, len(self.marginals))
        figure = Figure(figsize=(PAGE_WIDTH, 1.9 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        names = list(dict.fromkeys(name for one in self.marginals for name in (*one.densities, *one.points)))
        handles: dict[str, Artist] = {}
        for axes, one in zip(grid, self.marginals, strict=False):
            handles |= self._draw_panel(axes, one, names)
        for axes in grid[len(self.marginals) :]:
            axes.set_axis_off()
        figure.legend(
            handles=[handles[name] for name in names if name in handles], loc="outside upper center", ncols=3, frameon=False,
            fontsize="small",
        )  # fmt: skip
        return figure

    def _draw_panel(self, axes: Axes, one: Marginal, names: Sequence[str]) -> dict[str, Artist]:
        """Draw one panel and return its lines by posterior."""
        found: dict[str, Artist] = {}
        for name, density in one.densities.items():
            style = line_style(names.index(name))
            if name == self.reference:
                axes.fill_between(one.grid, density, color=PALE, linewidth=0)
                style = {"color": GREY, "linestyle": "-", "linewidth": 1.5}
            (found[name],) = axes.plot(one.grid, density, label=name, **style)
        for name, value in one.points.items():
            if one.grid[0] <= value <= one.grid[-1]:
                found[name] = axes.axvline(value, label=name, **{**line_style(names.index(name)), "linewidth": 1.0})
        axes.set_title(one.title, fontsize="small", parse_math=False)
        axes.set_ylim(bottom=0)
        axes.set_yticks([])
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(labelsize="small")
        plain_axes(axes)
        axes.spines["left"].set_visible(False)
        return found


_SCORES = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}


def draw_density(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    histograms: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    medians: Mapping[str, float],
    split: str,
) -> Figure:
    """Draw three scores against density, and histograms of the inclusion probabilities.

    Args:
        curves: posterior to density, accuracy, nll and ece; fractions, except nll in nats. A density of 0 is not drawn.
        histograms: posterior to one histogram per layer, with edges and counts.
        medians: posterior to the density of its median probability model, drawn as a dotted line.
        split: the split's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.2), layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    for axes, (key, title) in zip(panels, _SCORES.items(), strict=False):
        for place, (name, curve) in enumerate(curves.items()):
            style = line_style(place)
            shown = [(share, value) for share, value in zip(curve["density"], curve[key], strict=True) if share > 0]
            axes.plot(*zip(*shown, strict=True), label=name, marker="o", markersize=2.5, **style)
            if medians[name] > 0:
                axes.axvline(medians[name], color=style["color"], linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("density: share of weights kept")
        axes.set_ylabel(title)
        plain_axes(axes)
    panels[0].legend(
        title="dotted: inclusion above 1/2", title_fontsize="small", alignment="left", frameon=True, framealpha=0.9,
        edgecolor="none", fontsize="small",
    )  # fmt: skip
    _draw_histograms(panels[3], histograms)
    figure.suptitle(f"Pruning by inclusion probability, scores on {split}", fontsize="large")
    return figure


def _draw_histograms(axes: Axes, histograms: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw one line per layer for a single posterior, or one line per posterior with all layers pooled."""
    if len(histograms) == 1:
        (layers,) = histograms.values()
        lines = {f"layer {layer['layer']}": (layer["edges"], layer["counts"]) for layer in layers}
    else:
        lines = {
            name: (
                layers[0]["edges"],
                [sum(counts) for counts in zip(*(part["counts"] for part in layers), strict=True)],
            )
            for name, layers in histograms.items()
        }
    for place, (name, (edges, counts)) in enumerate(lines.items()):
        shares = [count / (sum(counts) or 1) for count in counts]
        axes.stairs(shares, edges, label=name, **line_style(place))
    axes.set_xlim(0, 1)
    axes.set_yscale("log")
    axes.set_xlabel("inclusion probability")
    axes.set_ylabel("share of the layer's weights" if len(histograms) == 1 else "share of weights")
    if len(histograms) == 1 and len(lines) > 1:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize="small")
    plain_axes(axes)


_LEAST = 1e-4  # smaller distances are unshaded
_MOST_SHADE = 0.6  # opacity that keeps numbers readable


@dataclass(frozen=True)
class DistanceMatrix:
    """Squared maximum mean discrepancies.

    Args:
        names: posteriors, in the order of rows and columns.
        values: by pair of names, in one order; None where undefined. Unbiased estimates may be negative.
        p_values: by the same pairs, where known.
        key: prefix of the figure's name.
    """

    names: Sequence[str]
    values: Mapping[tuple[str, str], float | None]
    p_values: Mapping[tuple[str, str], float | None]
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}mmd"

    @property
    def title(self) -> str:
        return "MMD² between posteriors"

    @property
    def description(self) -> str:
        return (
            "Squared maximum mean discrepancy between the draws of each pair of posteriors: 0 for equal "
            "distributions, larger and darker (logarithmic scale) the more they differ. A small p-value, in the "
            "table, means that chance does not explain the distance."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [[*pair, value, self.p_values.get(pair)] for pair, value in self.values.items()]
        return FigureNumbers(["posterior", "other", "MMD²", "p"], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        size = len(self.names)
        figure = Figure(figsize=(PAGE_WIDTH, 0.42 * size + 0.9), layout="constrained")
        axes = figure.add_subplot()
        largest = max((value for value in self.values.values() if value is not None), default=0.0)
        for row in range(1, size):
            for column in range(row):
                pair = self._pair(row, column)
                value = None if pair is None else self.values[pair]
                shade = 0.0 if value is None else _shade(value, largest)
                box = Rectangle((column, row - 1), 1, 1, facecolor=BLUE, alpha=shade, linewidth=0)
                axes.add_patch(box)
                edge = Rectangle(
                    (column, row - 1), 1, 1, facecolor="none", edgecolor=GREY, linewidth=0.5, clip_on=False
                )
                axes.add_patch(edge)
                text = "–" if value is None else f"{value + 0.0:.4f}" if abs(value) < 1 else f"{value:.3f}"
                axes.text(column + 0.5, row - 0.5, text, ha="center", va="center", fontsize=_letters(size), color=INK)
        axes.set_xlim(0, max(1, size - 1))
        axes.set_ylim(max(1, size - 1), 0)
        places = [place + 0.5 for place in range(size - 1)]
        axes.set_xticks(places, self.names[:-1], rotation=30, ha="right", rotation_mode="anchor", fontsize="small")
        axes.set_yticks(places, self.names[1:], fontsize="small")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        return figure

    def _pair(self, row: int, column: int) -> tuple[str, str] | None:
        one, other = self.names[column], self.names[row]
        return next((pair for pair in ((one, other), (other, one)) if pair in self.values), None)


def _shade(value: float, largest: float) -> float:
    """Return the opacity, from 0 to _MOST_SHADE, on a logarithmic scale."""
    if value <= _LEAST or largest <= _LEAST:
        return 0.0
    return _MOST_SHADE * math.log(value / _LEAST) / math.log(max(largest, 10 * _LEAST) / _LEAST)


def _letters(size: int) -> float:
    """Return the font size in points for the numbers of a matrix of this size."""
    return max(5.0, min(10.0, 54.0 / size))
