"""Pareto k and the spread of the log importance weights of Gaussians and flows, with what is called good.

Yao, Vehtari, Simpson and Gelman (2018), arXiv 1802.02538.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.figures._lines import plain_axes
from bnncli.figures.inks import BLUE, VERMILION
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GOOD: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 7}
_BAD: dict[str, Any] = {"color": VERMILION, "marker": "X", "markersize": 8}


class Weights(NamedTuple):
    """Importance weights of one posterior: Pareto k with its threshold, standard deviation of the log weights, nats."""

    name: str
    pareto_k: float | None
    threshold: float
    log_weight_sd: float | None


@dataclass(frozen=True)
class WeightSpread:
    """How far posteriors with a density are from their target.

    Args:
        weights: of each.
        good_sd: up to which the spread is good, nats.
        key: what its name begins with, where a page has several of its kind.
    """

    weights: Sequence[Weights]
    good_sd: float
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}pareto-k"

    @property
    def title(self) -> str:
        """In a few words."""
        return "Pareto k and spread of importance weights"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            "Draws of each posterior are weighted by the density ratio of the exact posterior. Pareto k "
            "measures the tail of these weights, the standard deviation of their logarithm their spread. "
            f"Circles, left of the dotted lines (k below its threshold, spread at most {self.good_sd:g} nats), "
            "match the exact posterior closely; crosses do not."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each posterior."""
        rows: list[list[Cell]] = [[one.name, one.pareto_k, one.threshold, one.log_weight_sd] for one in self.weights]
        return FigureNumbers(["posterior", "Pareto k", "threshold", "sd of log weights, nats"], rows)

    def draw(self) -> Figure:
        """Two panels with a common list of posteriors."""
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
    """A mark by whether the value is good, and where there is none nothing."""
    if value is not None:
        axes.plot([value], [place], linestyle="none", clip_on=False, zorder=3, **(_GOOD if value <= limit else _BAD))
