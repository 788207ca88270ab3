"""Accuracy, NLL and ECE against the share of weights that is left, and how sure the inclusions are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bnncli.figures._lines import line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SCORES = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}


def draw(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    histograms: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    medians: Mapping[str, float],
    split: str,
) -> Figure:
    """Four panels: three scores against density, and the shares of weights by inclusion probability.

    Args:
        curves: posterior to density, accuracy, nll and ece, fractions but for NLL; a density of 0 has no place on the axis.
        histograms: posterior to a histogram for each layer, edges and counts.
        medians: posterior to the density of its median probability model, a dotted line.
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
    """Layers apart of one posterior; of several, which have the lines of the other panels, all layers together."""
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
