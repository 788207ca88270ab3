"""Reliability diagrams: a panel for each posterior, accuracy against confidence over the number of examples in each bin.

Niculescu-Mizil and Caruana (2005), Predicting good probabilities with supervised learning; the gap to the diagonal is
what the expected calibration error averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.curves import frequency_interval
from bnncli.figures._lines import plain_axes
from bnncli.figures.inks import GREY, INK
from bnncli.figures.shown import Cell, FigureNumbers
from bnncli.names import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR, _GAP = "#7fa8cf", "#c44601"
_MOST_COLUMNS = 4
_MOST_LETTERS = 32  # of a name: about as wide as its panel


@dataclass(frozen=True)
class ReliabilityDiagrams:
    """Accuracy against confidence of every posterior on a split.

    Args:
        panels, errors: as draw takes them.
        key: what its name begins with, where a page has several of its kind.
    """

    panels: Mapping[str, Mapping[str, Sequence[Any]]]
    split: str
    errors: Mapping[str, float | None]
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}reliability-{self.split}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"Reliability on {self.split}"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            "Examples are grouped by confidence, the probability of the predicted class. Bars: accuracy of each group, with its exact 95% "
            "interval. Hatched: the gap to the group's mean confidence. If the network is calibrated, all bars end on the dashed diagonal. "
            "Below: the number of examples in each group, on a logarithmic axis."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each bin that holds examples."""
        rows: list[list[Cell]] = []
        for name, curve in self.panels.items():
            bins = zip(pairwise(curve["edges"]), curve["count"], curve["confidence"], curve["accuracy"], strict=True)
            rows += [
                [name, low, high, count, mean, right, *frequency_interval(right, count)]
                for (low, high), count, mean, right in bins
                if count
            ]
        columns = ["posterior", "from", "to", "examples", "mean confidence", "accuracy", "95% low", "95% high"]
        return FigureNumbers(columns, rows)

    def draw(self) -> Figure:
        """The diagrams, side by side."""
        return draw(self.panels, split=self.split, errors=self.errors, panel_width=2.1)


def draw(
    panels: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    split: str,
    errors: Mapping[str, float | None],
    most_columns: int = _MOST_COLUMNS,
    panel_width: float = 2.6,
) -> Figure:
    """A diagram for each panel, with its ECE in the title.

    Args:
        panels: name to edges (B + 1,), count, confidence and accuracy (B,), None in empty bins.
        split: the split's name.
        errors: name to the ECE, a fraction; None where it is not known.
        panel_width: inches.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / most_columns)
    columns = math.ceil(len(panels) / rows)
    figure = Figure(figsize=(panel_width * columns + 0.6, (panel_width + 0.9) * rows + 0.4), layout="constrained")
    heights = [3, 1] * rows
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=heights)
    for place, (name, curve) in enumerate(panels.items()):
        row, column = divmod(place, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        lower = figure.add_subplot(grid[2 * row + 1, column], sharex=upper)
        _draw_accuracy(upper, curve)
        _draw_counts(lower, curve)
        shown = name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
        error = "" if errors[name] is None else f"\nECE {errors[name]:.4f}"
        upper.set_title(f"{printable(shown)}{error}", fontsize="medium", parse_math=False)
        lower.set_xlabel("confidence")
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel("examples")
        if place == 0:
            handles = upper.get_legend_handles_labels()
    figure.suptitle(f"Reliability on {split}", fontsize="large")
    figure.legend(*handles, loc="outside lower center", ncols=3 if columns > 1 else 1, frameon=False, fontsize="small")
    return figure


def _draw_accuracy(axes: Axes, curve: Mapping[str, Sequence[Any]]) -> None:
    """Bars of the accuracy, a hatched one from there to the mean confidence, and the diagonal."""
    left, width = _bars(curve)
    accuracy = [0.0 if value is None else value for value in curve["accuracy"]]
    gap = [0.0 if c is None else c - a for c, a in zip(curve["confidence"], accuracy, strict=True)]
    shared: dict[str, Any] = {"align": "edge", "linewidth": 0.7}
    axes.bar(left, accuracy, width, color=_BAR, edgecolor="white", label="accuracy", **shared)
    axes.bar(
        left,
        gap,
        width,
        bottom=accuracy,
        color="none",
        edgecolor=_GAP,
        hatch="////",
        label="gap to confidence",
        **shared,
    )
    shown = [
        (start + size / 2, right, *frequency_interval(right, count))
        for start, size, right, count in zip(left, width, curve["accuracy"], curve["count"], strict=True)
        if count
    ]
    sides = [[right - low for _, right, low, _ in shown], [high - right for _, right, _, high in shown]]
    places, heights = [one[0] for one in shown], [one[1] for one in shown]
    axes.errorbar(
        places, heights, sides, fmt="none", color=INK, ecolor=INK, elinewidth=1, capsize=1.5, label="95% interval"
    )
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_ylim(0, 1)
    plain_axes(axes)
    axes.tick_params(labelbottom=False)


def _draw_counts(axes: Axes, curve: Mapping[str, Sequence[Any]]) -> None:
    """How many examples each bin holds, on a logarithmic axis: most examples are in the last."""
    left, width = _bars(curve)
    axes.bar(left, curve["count"], width, align="edge", color=GREY, edgecolor="white", linewidth=0.7)
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(10.0, 2.0 * max(curve["count"])))
    plain_axes(axes)


def _bars(curve: Mapping[str, Sequence[Any]]) -> tuple[list[float], list[float]]:
    edges = [float(edge) for edge in curve["edges"]]
    return edges[:-1], [high - low for low, high in pairwise(edges)]
