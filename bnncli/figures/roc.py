"""Receiver operating characteristics of out-of-distribution detection, a curve for each posterior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.figures._lines import legend_of, line_style, plain_axes
from bnncli.figures.inks import GREY
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Curves = Mapping[str, Mapping[str, Sequence[float]]]
Areas = Mapping[str, float | None]


@dataclass(frozen=True)
class Roc:
    """How well a score tells a split from an out-of-distribution one, for every posterior.

    Args:
        curves, areas, score: as draw takes them.
        key: what its name begins with, where a page has several of its kind.
    """

    curves: Curves
    split: str
    ood: str
    areas: Areas
    score: str
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}roc-{self.split}-{self.ood}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"Detection of {self.ood} by the {self.score} score"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            "An example is accepted if its score is above a threshold; each curve runs through all thresholds. "
            f"To the right: the share of {self.ood} that is accepted by mistake. Upwards: the share of "
            f"{self.split} that is accepted. The dotted diagonal is chance. AUROC is the area under the curve; 1 "
            "is perfect."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each point of each curve."""
        rows: list[list[Cell]] = [
            [name, *point]
            for name, curve in self.curves.items()
            for point in zip(curve["fpr"], curve["tpr"], strict=True)
        ]
        return FigureNumbers(["posterior", f"{self.ood} accepted", f"{self.split} accepted"], rows)

    def draw(self) -> Figure:
        """All curves in one plot."""
        return draw(self.curves, self.areas, split=self.split, ood=self.ood, score=self.score, width=PAGE_WIDTH)


def merged(curves: Curves, areas: Areas) -> tuple[Curves, Areas]:
    """The same, one curve for all posteriors where they have the same, as of a score of the features."""
    first = next(iter(curves), None)
    if first is None or len(curves) == 1 or any(curve != curves[first] for curve in curves.values()):
        return curves, areas
    return {"all posteriors": curves[first]}, {"all posteriors": areas[first]}


def draw(
    curves: Curves,
    areas: Areas,
    *,
    split: str,
    ood: str,
    score: str,
    width: float = 5.0,
) -> Figure:
    """All curves in one plot, each with the area under it in the legend.

    Args:
        curves: label to fpr and tpr, fractions, ascending.
        split, ood: names of the in-distribution split, whose examples are the positives, and of the other one.
        areas: label to AUROC; None where it is not known.
        score: what examples are told apart by.
        width: inches, of up to eight curves.
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
