"""Risk against coverage: the share of errors among the most confident predictions, a curve for each posterior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bnncli.figures._lines import legend_of, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(curves: Mapping[str, Mapping[str, Sequence[float]]], *, split: str, areas: Mapping[str, float]) -> Figure:
    """All curves in one plot, each with the area under it in the legend.

    Args:
        curves: label to coverage and risk, fractions, in ascending order of coverage.
        split: the split's name.
        areas: label to AURC.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.2) if len(curves) <= 8 else (7.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, curve) in enumerate(curves.items()):
        axes.plot(curve["coverage"], curve["risk"], label=f"{name}  {areas[name]:.4f}", **line_style(place))
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("coverage: share of examples, the most confident first")
    axes.set_ylabel("risk: share of errors among them")
    axes.set_title(f"Risk and coverage on {split}", fontsize="large")
    plain_axes(axes)
    legend_of(axes, len(curves), "AURC")
    return figure
