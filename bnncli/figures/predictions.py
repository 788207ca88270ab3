"""Figures of predictions: reliability, confidence, risk-coverage, ROC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.curves import frequency_interval
from bnncli.figures.style import GREY, INK, PAGE_WIDTH, PALE, Cell, FigureNumbers, legend_of, line_style, plain_axes
from bnncli.names import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_BAR, _GAP = "#7fa8cf", "#c44601"
_MOST_COLUMNS = 4
_MOST_LETTERS = 32  # of a name: about the width of its panel


@dataclass(frozen=True)
class ReliabilityDiagrams:
    """Reliability diagrams of all posteriors on a split.

    Args:
        panels, errors: as for `draw_reliability`.
        key: prefix of the figure's name.
    """

    panels: Mapping[str, Mapping[str, Sequence[Any]]]
    split: str
    errors: Mapping[str, float | None]
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}reliability-{self.split}"

    @property
    def title(self) -> str:
        return f"Reliability on {self.split}"

    @property
    def description(self) -> str:
        return (
            "Examples are grouped by confidence, the probability of the predicted class. Bars: accuracy of each group, with its exact 95% "
            "interval. Hatched: the gap to the group's mean confidence. If the network is calibrated, all bars end on the dashed diagonal. "
            "Below: the number of examples in each group, on a logarithmic axis."
        )

    @property
    def numbers(self) -> FigureNumbers:
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
        return draw_reliability(self.panels, split=self.split, errors=self.errors, panel_width=2.1)


def draw_reliability(
    panels: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    split: str,
    errors: Mapping[str, float | None],
    most_columns: int = _MOST_COLUMNS,
    panel_width: float = 2.6,
) -> Figure:
    """Draw a reliability diagram per panel, with the ECE in the title.

    Args:
        panels: name to edges (B + 1,), count, confidence and accuracy (B,); None in empty bins.
        split: the split's name.
        errors: name to ECE, a fraction; None where unknown.
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
    """Draw accuracy bars, hatched bars up to the mean confidence, and the diagonal."""
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
    """Draw the number of examples per bin; logarithmic, because most examples are in the last bin."""
    left, width = _bars(curve)
    axes.bar(left, curve["count"], width, align="edge", color=GREY, edgecolor="white", linewidth=0.7)
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(10.0, 2.0 * max(curve["count"])))
    plain_axes(axes)


def _bars(curve: Mapping[str, Sequence[Any]]) -> tuple[list[float], list[float]]:
    edges = [float(edge) for edge in curve["edges"]]
    return edges[:-1], [high - low for low, high in pairwise(edges)]


_COLUMNS = 4
_PANEL_WIDTH = 2.2  # inches


@dataclass(frozen=True)
class ConfidenceHistograms:
    """Confidence histograms of all posteriors on each split.

    Args:
        edges: (B + 1,), from 0 to 1.
        panels: posterior to counts (B,) per split; each includes the first split.
        split: the in-distribution split, first in each panel.
        key: prefix of the figure's name.
    """

    edges: Sequence[float]
    panels: Mapping[str, Mapping[str, Sequence[int]]]
    split: str
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}confidence-{self.split}"

    @property
    def title(self) -> str:
        return "Confidence in and out of distribution"

    @property
    def description(self) -> str:
        others = list(dict.fromkeys(name for counts in self.panels.values() for name in counts if name != self.split))
        outside = f" and of {', '.join(others)} (out of distribution)" if others else ""
        return (
            "Histograms of confidence, the largest probability of a prediction, over the examples of "
            f"{self.split}{outside}. A good posterior is confident on the first, to the right, and not on the "
            "others, to the left."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [
            [name, split, low, high, count, count / sum(counts)]
            for name, panel in self.panels.items()
            for split, counts in panel.items()
            for (low, high), count in zip(pairwise(self.edges), counts, strict=True)
            if count
        ]
        return FigureNumbers(["posterior", "split", "from", "to", "examples", "share"], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        rows = math.ceil(len(self.panels) / _COLUMNS)
        columns = math.ceil(len(self.panels) / rows)
        figure = Figure(figsize=(max(PAGE_WIDTH, _PANEL_WIDTH * columns), 1.75 * rows + 0.9), layout="constrained")
        figure.get_layout_engine().set(wspace=0.05)  # type: ignore[union-attr, call-arg]
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        splits = list(dict.fromkeys(name for counts in self.panels.values() for name in counts))
        for axes, (name, counts) in zip(grid, self.panels.items(), strict=False):
            self._draw_panel(axes, counts, splits)
            axes.set_title(name, fontsize="medium", parse_math=False)
        for axes in grid[len(self.panels) :]:
            axes.set_axis_off()
        for axes in grid[max(0, len(self.panels) - columns) : len(self.panels)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("confidence")
        for axes in grid[::columns]:
            axes.set_ylabel("share of examples")
        lines = {line.get_label(): line for axes in grid for line in axes.patches if line.get_label() in splits}
        figure.legend(
            handles=[lines[name] for name in splits if name in lines], loc="outside upper center", ncols=3, frameon=False,
            fontsize="small",
        )  # fmt: skip
        return figure

    def _draw_panel(self, axes: Axes, counts: Mapping[str, Sequence[int]], splits: Sequence[str]) -> None:
        """Draw the first split filled and the others as lines."""
        for name, numbers in counts.items():
            shares = [count / (sum(numbers) or 1) for count in numbers]
            if name == self.split:
                axes.stairs(shares, self.edges, fill=True, color=PALE)
            axes.stairs(shares, self.edges, label=name, **line_style(splits.index(name)))
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_ylim(bottom=0)
        plain_axes(axes)


@dataclass(frozen=True)
class RiskCoverage:
    """Risk-coverage curves of all posteriors on a split.

    Args:
        curves, areas: as for `draw_risk_coverage`.
        key: prefix of the figure's name.
    """

    curves: Mapping[str, Mapping[str, Sequence[float]]]
    split: str
    areas: Mapping[str, float | None]
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}risk-coverage-{self.split}"

    @property
    def title(self) -> str:
        return f"Risk and coverage on {self.split}"

    @property
    def description(self) -> str:
        return (
            "From left to right, more examples are accepted, the most confident first. The height is the share "
            "of errors among those accepted; at the right end all are accepted. Lower is better. AURC is the "
            "area under the curve."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [
            [name, *point]
            for name, curve in self.curves.items()
            for point in zip(curve["coverage"], curve["risk"], strict=True)
        ]
        return FigureNumbers(["posterior", "coverage", "risk"], rows)

    def draw(self) -> Figure:
        return draw_risk_coverage(self.curves, split=self.split, areas=self.areas, width=PAGE_WIDTH)


def draw_risk_coverage(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    split: str,
    areas: Mapping[str, float | None],
    width: float = 5.6,
) -> Figure:
    """Draw all curves in one plot, with the areas in the legend.

    Args:
        curves: label to coverage and risk, fractions, by increasing coverage.
        split: the split's name.
        areas: label to AURC; None where unknown.
        width: inches, for up to eight curves.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 0.75 * width) if len(curves) <= 8 else (7.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, curve) in enumerate(curves.items()):
        area = "" if areas[name] is None else f"  {areas[name]:.4f}"
        axes.plot(curve["coverage"], curve["risk"], label=f"{name}{area}", **line_style(place))
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("coverage: share of examples, the most confident first")
    axes.set_ylabel("risk: share of errors among them")
    axes.set_title(f"Risk and coverage on {split}", fontsize="large")
    plain_axes(axes)
    legend_of(axes, len(curves), "AURC")
    return figure


Curves = Mapping[str, Mapping[str, Sequence[float]]]
Areas = Mapping[str, float | None]


@dataclass(frozen=True)
class Roc:
    """ROC curves of all posteriors for one out-of-distribution split.

    Args:
        curves, areas, score: as for `draw_roc`.
        key: prefix of the figure's name.
    """

    curves: Curves
    split: str
    ood: str
    areas: Areas
    score: str
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}roc-{self.split}-{self.ood}"

    @property
    def title(self) -> str:
        return f"Detection of {self.ood} by the {self.score} score"

    @property
    def description(self) -> str:
        return (
            "An example is accepted if its score is above a threshold; each curve runs through all thresholds. "
            f"To the right: the share of {self.ood} that is accepted by mistake. Upwards: the share of "
            f"{self.split} that is accepted. The dotted diagonal is chance. AUROC is the area under the curve; 1 "
            "is perfect."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [
            [name, *point]
            for name, curve in self.curves.items()
            for point in zip(curve["fpr"], curve["tpr"], strict=True)
        ]
        return FigureNumbers(["posterior", f"{self.ood} accepted", f"{self.split} accepted"], rows)

    def draw(self) -> Figure:
        return draw_roc(self.curves, self.areas, split=self.split, ood=self.ood, score=self.score, width=PAGE_WIDTH)


def merge_equal_curves(curves: Curves, areas: Areas) -> tuple[Curves, Areas]:
    """Merge the curves if all posteriors have the same one, as for a feature score."""
    first = next(iter(curves), None)
    if first is None or len(curves) == 1 or any(curve != curves[first] for curve in curves.values()):
        return curves, areas
    return {"all posteriors": curves[first]}, {"all posteriors": areas[first]}


def draw_roc(
    curves: Curves,
    areas: Areas,
    *,
    split: str,
    ood: str,
    score: str,
    width: float = 5.0,
) -> Figure:
    """Draw all curves in one plot, with the areas in the legend.

    Args:
        curves: label to fpr and tpr, fractions, ascending.
        split, ood: names of the in-distribution split (positives) and of the out-of-distribution split.
        areas: label to AUROC; None where unknown.
        score: name of the detection score.
        width: inches, for up to eight curves.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 0.96 * width) if len(curves) <= 8 else (7.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    for place, (name, curve) in enumerate(curves.items()):
        area = "" if areas[name] is None else f"  {areas[name]:.3f}"
        axes.plot(curve["fpr"], curve["tpr"], label=f"{name}{area}", **line_style(place))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel(f"false positive rate: share of {ood} accepted")
    axes.set_ylabel(f"true positive rate: share of {split} accepted")
    axes.set_title(f"Detection of {ood} by the {score} score", fontsize="large")
    plain_axes(axes)
    legend_of(axes, len(curves), "AUROC", "lower right")
    return figure
