"""Ranks of simulation-based calibration: distribution functions less the uniform one, in the band that all of it keeps to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.rank_uniformity import RankLaw
from bnncli.figures._lines import plain_axes
from bnncli.figures.inks import GREY, PALE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IN, _OUT = "#0072b2", "#d55e00"
_COLUMNS = 3


def draw(ranks: Mapping[str, NDArray[np.int64]], law: RankLaw, *, level: float, title: str) -> Figure:
    """A panel for each quantity: the share of ranks below each, less that expected, and the band for all ranks at once.

    Args:
        ranks: (M,) of each quantity by its name.
        law: of uniform ranks.
        level: with which uniform ranks leave a panel's band.
        title: whose ranks these are.
    """
    from matplotlib.figure import Figure

    num_rows = math.ceil(len(ranks) / _COLUMNS)
    figure = Figure(figsize=(3.3 * _COLUMNS, 2.5 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, _COLUMNS, sharex=True, squeeze=False).flatten()
    lowest, highest = (bound / law.num_simulations - law.shares for bound in law.bounds(level))
    for place, (name, some) in enumerate(ranks.items()):
        panel = axes[place]
        difference = law.counts(some) / law.num_simulations - law.shares
        is_in = bool(((difference >= lowest - 1e-12) & (difference <= highest + 1e-12)).all())
        panel.fill_between(law.shares, lowest, highest, color=PALE, linewidth=0, label="uniform ranks")
        panel.axhline(0, color=GREY, linewidth=0.8)
        panel.step(law.shares, difference, where="mid", color=_IN if is_in else _OUT, linewidth=1.5 if is_in else 2.2)
        panel.set_title(
            name if is_in else f"{name}: outside", fontsize="small", fontweight="normal" if is_in else "bold"
        )
        plain_axes(panel)
    for panel in axes[len(ranks) :]:
        panel.set_axis_off()
    figure.suptitle(f"{title}; grey: uniform ranks stay inside with probability {1 - level:.3g}", fontsize="medium")
    figure.supxlabel("rank of the truth among the draws, as a share", fontsize="medium")
    figure.supylabel("share of ranks below, minus the expected share", fontsize="medium")
    return figure
