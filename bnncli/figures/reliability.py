"""Reliability diagrams: a panel for each posterior, accuracy against confidence over the number of examples in each bin.

Niculescu-Mizil and Caruana (2005), Predicting good probabilities with supervised learning; the gap to the diagonal is
what the expected calibration error averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bnncli.figures._lines import GREY, plain_axes
from bnncli.names import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR, _GAP = "#7fa8cf", "#c44601"
_MOST_COLUMNS = 4
_MOST_LETTERS = 32  # of a name: about as wide as its panel


def draw(panels: Mapping[str, Mapping[str, Sequence[Any]]], *, split: str, errors: Mapping[str, float]) -> Figure:
    """A diagram for each panel, with its ECE in the title.

    Args:
        panels: name to edges (B + 1,), count, confidence and accuracy (B,), None in empty bins.
        split: the split's name.
        errors: name to the ECE, a fraction.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / _MOST_COLUMNS)
    columns = math.ceil(len(panels) / rows)
    figure = Figure(figsize=(2.6 * columns + 0.6, 3.5 * rows + 0.4), layout="constrained")
    heights = [3, 1] * rows
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=heights)
    for place, (name, curve) in enumerate(panels.items()):
        row, column = divmod(place, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        lower = figure.add_subplot(grid[2 * row + 1, column], sharex=upper)
        _draw_accuracy(upper, curve)
        _draw_counts(lower, curve)
        shown = name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
        upper.set_title(f"{printable(shown)}\nECE {errors[name]:.4f}", fontsize="medium", parse_math=False)
        lower.set_xlabel("confidence")
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel("examples")
        if place == 0:
            upper.legend(frameon=False, fontsize="small", loc="upper left")
    figure.suptitle(f"Reliability on {split}", fontsize="large")
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
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.set_xlim(0, 1)
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
