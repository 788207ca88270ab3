"""Figures of chains: traces, R-hat and effective sample sizes, rank plots, ranks of simulation-based calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.convergence import RankLaw
from bnncli.figures.style import BLUE, GREY, PAGE_WIDTH, PALE, VERMILION, Cell, FigureNumbers, line_style, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trace(NamedTuple):
    """Block means of one quantity: chain numbers, the middle draw of each block (B,), and the means of each chain (B,)."""

    quantity: str
    chains: Sequence[int]
    draws: Sequence[float]
    means: Sequence[Sequence[float]]


@dataclass(frozen=True)
class ChainTraces:
    """Traces of chains, from the first draw to the last.

    Args:
        posterior: its name.
        traces: one per panel.
        num_chains: number of chains; not all need to be drawn.
        key: prefix of the figure's name.
    """

    posterior: str
    traces: Sequence[Trace]
    num_chains: int
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}traces-{self.posterior}"

    @property
    def title(self) -> str:
        return f"Chains of {self.posterior}"

    @property
    def description(self) -> str:
        shown = len(self.traces[0].chains)
        some = "" if shown == self.num_chains else f" {shown} of {self.num_chains} chains are drawn."
        return (
            "One line per chain: means over consecutive draws. Chains that have mixed cross each other "
            f"throughout and show no trend.{some}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [
            [trace.quantity, draw, *(means[place] for means in trace.means)]
            for trace in self.traces
            for place, draw in enumerate(trace.draws)
        ]
        return FigureNumbers(["quantity", "middle draw", *(f"chain {chain}" for chain in self.traces[0].chains)], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(PAGE_WIDTH, 2.1 * len(self.traces) + 0.2), layout="constrained")
        grid = figure.subplots(len(self.traces), 1, sharex=True, squeeze=False).flatten()
        for axes, trace in zip(grid, self.traces, strict=True):
            for place, means in enumerate(trace.means):
                axes.plot(trace.draws, means, **{**line_style(place), "linewidth": 1.0})
            axes.set_title(trace.quantity, fontsize="medium", parse_math=False)
            axes.set_ylabel("mean of a block")
            axes.ticklabel_format(axis="y", useOffset=False)
            plain_axes(axes)
        grid[-1].set_xlabel("draw")
        return figure


class Histogram(NamedTuple):
    """Counts (B,) of a quantity between edges (B + 1,)."""

    name: str
    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class Mixing:
    """Convergence diagnostics over parameters.

    Args:
        posterior: its name.
        r_hat: None if undefined.
        sizes: effective sample sizes, bulk and tail, with the same edges.
        good_r_hat: largest good R-hat.
        good_size: smallest good effective sample size.
        num_parameters: number of parameters.
        key: prefix of the figure's name.
    """

    posterior: str
    r_hat: Histogram | None
    sizes: Sequence[Histogram]
    good_r_hat: float
    good_size: float
    num_parameters: int
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.key}mixing-{self.posterior}"

    @property
    def title(self) -> str:
        return f"R-hat and effective sample size of {self.posterior}"

    @property
    def description(self) -> str:
        return (
            f"Histograms over {self.num_parameters:,} parameters. R-hat is 1 if chains agree, and good up to "
            f"{self.good_r_hat:g}. The effective sample size is the number of independent draws that would be as "
            "informative, for the middle (bulk) and for the 5% and 95% quantiles (tail); it is good from "
            f"{self.good_size:g}. Dotted lines mark these limits. The worst parameter decides."
        )

    @property
    def numbers(self) -> FigureNumbers:
        rows: list[list[Cell]] = [
            [one.name, low, high, count]
            for one in [*([self.r_hat] if self.r_hat is not None else []), *self.sizes]
            for (low, high), count in zip(pairwise(one.edges), one.counts, strict=True)
            if count
        ]
        return FigureNumbers(["quantity", "from", "to", "parameters"], rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        panels = [*([[self.r_hat]] if self.r_hat is not None else []), list(self.sizes)]
        figure = Figure(figsize=(PAGE_WIDTH, 2.5), layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False).flatten()
        for axes, histograms in zip(grid, panels, strict=True):
            for place, one in enumerate(histograms):
                style: dict[str, Any] = line_style(place)
                axes.stairs(
                    one.counts, one.edges, fill=place == 0, color=style["color"], alpha=0.25 if place == 0 else 0.0
                )
                axes.stairs(one.counts, one.edges, label=one.name, **style)
            good = self.good_r_hat if histograms[0] is self.r_hat else self.good_size
            low, high = histograms[0].edges[0], histograms[0].edges[-1]
            if low <= good <= high:
                axes.axvline(good, color=VERMILION, linewidth=1.2, linestyle=":", label=f"good: {good:g}")
            axes.set_xlabel("R-hat" if histograms[0] is self.r_hat else "effective sample size")
            axes.tick_params(labelsize="small")
            axes.locator_params(axis="x", nbins=4)
            axes.ticklabel_format(axis="x", useOffset=False)
            plain_axes(axes)
            axes.set_ylim(top=1.22 * max(max(one.counts) for one in histograms))
            if len(histograms) > 1:
                axes.legend(frameon=False, fontsize="small", loc="upper center", ncols=3, columnspacing=1.0)
        grid[0].set_ylabel("parameters")
        return figure


_COLUMNS = 4


@dataclass(frozen=True)
class RankHistograms:
    """Rank histograms of one quantity, one per chain.

    Args:
        posterior: its name.
        quantity: the ranked quantity.
        chains: numbers of the chains drawn, out of num_chains.
        counts: per chain, draws (B,) in B equal intervals of the ranks.
        band: low and high bound of a bin; contains it with probability 0.99 if draws are independent and chains agree.
        key: prefix of the figure's name.
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
        return f"{self.key}ranks-{self.posterior}"

    @property
    def title(self) -> str:
        return f"Ranks of {self.quantity} in the chains of {self.posterior}"

    @property
    def description(self) -> str:
        shown = len(self.chains)
        some = "" if shown == self.num_chains else f" {shown} of {self.num_chains} chains are drawn."
        return (
            "All draws of all chains are ranked together; each panel counts the ranks of one chain. If chains "
            "have mixed, all steps are about as high as the dotted line. The grey band contains a step with "
            f"probability 0.99 if draws are independent; correlated draws leave it more often.{some}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        num_bins = len(self.counts[0])
        heads = [f"{100 * place / num_bins:.3g} to {100 * (place + 1) / num_bins:.3g}%" for place in range(num_bins)]
        rows: list[list[Cell]] = [[chain, *counts] for chain, counts in zip(self.chains, self.counts, strict=True)]
        return FigureNumbers(["chain", *heads], rows)

    def draw(self) -> Figure:
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


_IN, _OUT = "#0072b2", "#d55e00"
_RANK_COLUMNS = 3


def draw_ranks(ranks: Mapping[str, NDArray[np.int64]], law: RankLaw, *, level: float, title: str) -> Figure:
    """Draw, per quantity, the ECDF of the ranks minus its expectation, with a simultaneous band.

    Args:
        ranks: (M,) per quantity.
        law: distribution of uniform ranks.
        level: probability that uniform ranks leave a panel's band.
        title: source of the ranks.
    """
    from matplotlib.figure import Figure

    num_rows = math.ceil(len(ranks) / _RANK_COLUMNS)
    figure = Figure(figsize=(3.3 * _RANK_COLUMNS, 2.5 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, _RANK_COLUMNS, sharex=True, squeeze=False).flatten()
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
