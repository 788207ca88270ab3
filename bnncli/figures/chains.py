"""Traces of chains: means over blocks of draws, a line for each chain, a panel for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures._lines import line_style, plain_axes
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trace(NamedTuple):
    """Block means of one quantity: their chains' numbers, the middle draw (B,) of each block, and the means of each chain (B,)."""

    quantity: str
    chains: Sequence[int]
    draws: Sequence[float]
    means: Sequence[Sequence[float]]


@dataclass(frozen=True)
class ChainTraces:
    """What chains did from their first draw to the last.

    Args:
        posterior: its name.
        traces: a panel each.
        num_chains: how many there are, of which some may be left out.
        key: what its name begins with, where a page has several of its kind.
    """

    posterior: str
    traces: Sequence[Trace]
    num_chains: int
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}traces-{self.posterior}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"Chains of {self.posterior}"

    @property
    def description(self) -> str:
        """How it is read."""
        shown = len(self.traces[0].chains)
        some = "" if shown == self.num_chains else f" {shown} of {self.num_chains} chains are drawn."
        return (
            "One line per chain: means over consecutive draws. Chains that have mixed cross each other "
            f"throughout and show no trend.{some}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each block, a column for each chain."""
        rows: list[list[Cell]] = [
            [trace.quantity, draw, *(means[place] for means in trace.means)]
            for trace in self.traces
            for place, draw in enumerate(trace.draws)
        ]
        return FigureNumbers(["quantity", "middle draw", *(f"chain {chain}" for chain in self.traces[0].chains)], rows)

    def draw(self) -> Figure:
        """The panels, above each other."""
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
