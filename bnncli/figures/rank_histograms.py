"""Rank plots of chains: how often draws of each chain fall into each part of all draws together, in order of size.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), arXiv 1903.08008, section 5.2: what trace plots do not show of many draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.figures._lines import plain_axes
from bnncli.figures.inks import BLUE, GREY, PALE
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4


@dataclass(frozen=True)
class RankHistograms:
    """Ranks of one quantity in every chain.

    Args:
        posterior: its name. quantity: what is ranked.
        chains: numbers of the chains that are drawn, of num_chains.
        counts: of each of them, (B,) draws in each of B equal parts of the ranks.
        band: low and high, between which a step lies with probability 0.99 where draws are independent and chains agree.
        key: what its name begins with, where a page has several of its kind.
    """

    posterior: str
    quantity: str
    chains: Sequence[int]
    counts: Sequence[Sequence[int]]
    band: tuple[float, float]
    num_chains: int
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}ranks-{self.posterior}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"Ranks of {self.quantity} in the chains of {self.posterior}"

    @property
    def description(self) -> str:
        """How it is read."""
        shown = len(self.chains)
        some = "" if shown == self.num_chains else f" {shown} of {self.num_chains} chains are drawn."
        return (
            "All draws of all chains are ranked together; each panel counts the ranks of one chain. If chains "
            "have mixed, all steps are about as high as the dotted line. The grey band contains a step with "
            f"probability 0.99 if draws are independent; correlated draws leave it more often.{some}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each chain, a column for each part of the ranks."""
        num_bins = len(self.counts[0])
        heads = [f"{100 * place / num_bins:.3g} to {100 * (place + 1) / num_bins:.3g}%" for place in range(num_bins)]
        rows: list[list[Cell]] = [[chain, *counts] for chain, counts in zip(self.chains, self.counts, strict=True)]
        return FigureNumbers(["chain", *heads], rows)

    def draw(self) -> Figure:
        """A small panel for each chain, on common axes."""
        from matplotlib.figure import Figure

        num_bins, shown = len(self.counts[0]), len(self.counts)
        columns = min(_COLUMNS, shown)
        rows = math.ceil(shown / columns)
        figure = Figure(figsize=(PAGE_WIDTH, 0.95 * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        edges = [place / num_bins for place in range(num_bins + 1)]
        top = 1.08 * max(self.band[1], *(count for counts in self.counts for count in counts))
        expected = sum(map(sum, self.counts)) / (shown * num_bins)
        for axes, chain, counts in zip(grid, self.chains, self.counts, strict=False):
            axes.axhspan(*self.band, color=PALE, linewidth=0)
            axes.axhline(expected, color=GREY, linewidth=0.9, linestyle=":")
            axes.stairs(counts, edges, baseline=None, color=BLUE, linewidth=1.5)
            axes.set_ylim(0, top)
            axes.set_title(f"chain {chain}", fontsize="small", pad=3)
            plain_axes(axes)
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 1], ["0", "1"])
            axes.tick_params(labelsize="small")
            axes.grid(visible=False)
        for axes in grid[shown:]:
            axes.set_axis_off()
        figure.supxlabel("rank among all draws, as a share", fontsize="medium")
        figure.supylabel("draws", fontsize="medium")
        return figure
