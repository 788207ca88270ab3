"""Receiver operating characteristics of out-of-distribution detection, a curve for each posterior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bnncli.figures._lines import GREY, legend_of, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    curves: Mapping[str, Mapping[str, Sequence[float]]], *, split: str, ood: str, areas: Mapping[str, float]
) -> Figure:
    """All curves in one plot, each with the area under it in the legend.

    Args:
        curves: label to fpr and tpr, fractions, ascending.
        split, ood: names of the in-distribution split, whose examples are the positives, and of the other one.
        areas: label to AUROC.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 4.8) if len(curves) <= 8 else (7.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    for place, (name, curve) in enumerate(curves.items()):
        axes.plot(curve["fpr"], curve["tpr"], label=f"{name}  {areas[name]:.3f}", **line_style(place))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel(f"false positive rate: share of {ood} accepted")
    axes.set_ylabel(f"true positive rate: share of {split} accepted")
    axes.set_title(f"Detection of {ood} by maximum probability", fontsize="large")
    plain_axes(axes)
    legend_of(axes, len(curves), "AUROC")
    return figure
