"""Functions of one input with their uncertainty: a panel for each, mean and two standard deviations, the examples in all.

After figure 4 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.figures.style import plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINE, _BAND, _FAINT = "#0072b2", "#9ecae1", "#deebf7"


class BandPanel(NamedTuple):
    """A title, mean and standard deviation at every place."""

    title: str
    mean: NDArray[np.float64]
    sd: NDArray[np.float64]


def draw(
    panels: Sequence[BandPanel],
    places: NDArray[np.float64],
    examples: tuple[NDArray[np.float64], NDArray[np.float64]],
    *,
    title: str,
) -> Figure:
    """The panels side by side, on one scale that is cut where a band leaves thrice the examples' range.

    Args:
        places: (M,), rising. examples: inputs and labels (N,) each.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(panels) + 0.4, 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for place, panel in zip(axes, panels, strict=True):
        for factor, color in ((2, _FAINT), (1, _BAND)):
            place.fill_between(places, panel.mean - factor * panel.sd, panel.mean + factor * panel.sd, color=color)
        place.plot(places, panel.mean, color=_LINE, linewidth=1.5)
        place.plot(*examples, marker="o", markersize=3, linestyle="none", color="black")
        place.set_title(panel.title, fontsize="medium")
        place.set_xlabel("input")
        plain_axes(place)
    middle, half = (examples[1].max() + examples[1].min()) / 2, (examples[1].max() - examples[1].min()) / 2
    reached = max(float((np.abs(panel.mean - middle) + 2 * panel.sd).max()) for panel in panels)
    axes[0].set_ylim(middle - min(reached, 3 * half), middle + min(reached, 3 * half))
    axes[0].set_ylabel("output")
    figure.suptitle(title, fontsize="large")
    return figure
