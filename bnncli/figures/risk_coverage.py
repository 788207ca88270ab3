"""Risk against coverage: the share of errors among the most confident predictions, a curve for each posterior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.figures._lines import legend_of, line_style, plain_axes
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RiskCoverage:
    """The share of errors among the most confident predictions of every posterior on a split.

    Args:
        curves, areas: as draw takes them.
        key: what its name begins with, where a page has several of its kind.
    """

    curves: Mapping[str, Mapping[str, Sequence[float]]]
    split: str
    areas: Mapping[str, float | None]
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}risk-coverage-{self.split}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"Risk and coverage on {self.split}"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            "From left to right, more examples are accepted, the most confident first. The height is the share "
            "of errors among those accepted; at the right end all are accepted. Lower is better. AURC is the "
            "area under the curve."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each point of each curve."""
        rows: list[list[Cell]] = [
            [name, *point]
            for name, curve in self.curves.items()
            for point in zip(curve["coverage"], curve["risk"], strict=True)
        ]
        return FigureNumbers(["posterior", "coverage", "risk"], rows)

    def draw(self) -> Figure:
        """All curves in one plot."""
        return draw(self.curves, split=self.split, areas=self.areas, width=PAGE_WIDTH)


def draw(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    split: str,
    areas: Mapping[str, float | None],
    width: float = 5.6,
) -> Figure:
    """All curves in one plot, each with the area under it in the legend.

    Args:
        curves: label to coverage and risk, fractions, in ascending order of coverage.
        split: the split's name.
        areas: label to AURC; None where it is not known.
        width: inches, of up to eight curves.
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
