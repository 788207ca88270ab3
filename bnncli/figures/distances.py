"""Distances between all pairs of posteriors as a table of shaded cells, each with its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.figures.inks import BLUE, GREY, INK
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 1e-4  # distances below it are unshaded
_MOST_SHADE = 0.6  # of the ink, so that numbers stay readable on it


@dataclass(frozen=True)
class DistanceMatrix:
    """Squared maximum mean discrepancies.

    Args:
        names: of the posteriors, in the order of rows and columns.
        values: by pairs of names, each in one order; None where undefined. Unbiased estimates may be below zero.
        p_values: by the same pairs, as far as they are known.
        key: what its name begins with, where a page has several of its kind.
    """

    names: Sequence[str]
    values: Mapping[tuple[str, str], float | None]
    p_values: Mapping[tuple[str, str], float | None]
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}mmd"

    @property
    def title(self) -> str:
        """In a few words."""
        return "MMD² between posteriors"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            "Squared maximum mean discrepancy between the draws of each pair of posteriors: 0 for equal "
            "distributions, larger and darker (logarithmic scale) the more they differ. A small p-value, in the "
            "table, means that chance does not explain the distance."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each pair."""
        rows: list[list[Cell]] = [[*pair, value, self.p_values.get(pair)] for pair, value in self.values.items()]
        return FigureNumbers(["posterior", "other", "MMD²", "p"], rows)

    def draw(self) -> Figure:
        """The lower half of the matrix."""
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
    """From 0 to _MOST_SHADE, by the logarithm."""
    if value <= _LEAST or largest <= _LEAST:
        return 0.0
    return _MOST_SHADE * math.log(value / _LEAST) / math.log(max(largest, 10 * _LEAST) / _LEAST)


def _letters(size: int) -> float:
    """Points that a number may have where so many stand beside each other."""
    return max(5.0, min(10.0, 54.0 / size))
