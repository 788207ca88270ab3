"""Beta distributions and their Laplace approximations: in the standard basis, in the softmax basis, and that one transformed back.

After figure 2.1 of Hobbhahn (2020), arXiv 2003.01227, and Hennig et al. (2012), Kernel topic models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.figures.style import line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES = ("standard basis", "softmax basis", "softmax basis, transformed back")
_HIGHEST = 4.5  # of a density that is shown


class BetaCurves(NamedTuple):
    """A Beta: its name, and of each panel x, `own` and `approximation`, None where there is none."""

    name: str
    standard: Mapping[str, Any]
    softmax: Mapping[str, Any]
    back: Mapping[str, Any]


def draw(curves: Sequence[BetaCurves]) -> Figure:
    """Three panels with all Betas as whole lines, their approximations dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    for place, axes in enumerate(figure.subplots(1, 3)):
        for number, one in enumerate(curves):
            color, panel = line_style(number)["color"], (one.standard, one.softmax, one.back)[place]
            axes.plot(panel["x"], panel["own"], color=color, linewidth=1.5, label=one.name)
            if panel["approximation"] is not None:
                label = f"{one.name}, Laplace"
                axes.plot(
                    panel["x"], panel["approximation"], color=color, linewidth=1.3, linestyle=(0, (4, 2)), label=label
                )
        axes.set_title(_TITLES[place], fontsize="medium")
        axes.set_xlabel("logit" if place == 1 else "probability")
        axes.set_ylim(0, None if place == 1 else _HIGHEST)
        plain_axes(axes)
    figure.axes[0].set_ylabel("density")
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False, fontsize="small")
    figure.suptitle("Laplace approximations of Beta distributions (dashed)", fontsize="large")
    return figure
