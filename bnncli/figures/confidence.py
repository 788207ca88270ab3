"""Histograms of the confidence of predictions, in and out of distribution: a panel for each posterior.

Sure predictions of what the network was never trained for are what these show: Nguyen, Yosinski and Clune (2015), arXiv 1412.1897.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bnncli.figures._lines import line_style, plain_axes
from bnncli.figures.inks import PALE
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_PANEL_WIDTH = 2.2  # inches


@dataclass(frozen=True)
class ConfidenceHistograms:
    """How sure every posterior is of the examples of each split.

    Args:
        edges: (B + 1,) of the bins, from 0 to 1.
        panels: posterior to the counts (B,) of each split; every one has the first of them.
        split: the split inside the distribution, the first of each panel.
        key: what its name begins with, where a page has several of its kind.
    """

    edges: Sequence[float]
    panels: Mapping[str, Mapping[str, Sequence[int]]]
    split: str
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}confidence-{self.split}"

    @property
    def title(self) -> str:
        """In a few words."""
        return "Confidence in and out of distribution"

    @property
    def description(self) -> str:
        """How it is read."""
        others = list(dict.fromkeys(name for counts in self.panels.values() for name in counts if name != self.split))
        outside = f" and of {', '.join(others)} (out of distribution)" if others else ""
        return (
            "Histograms of confidence, the largest probability of a prediction, over the examples of "
            f"{self.split}{outside}. A good posterior is confident on the first, to the right, and not on the "
            "others, to the left."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each bin of each split in which there are examples."""
        rows: list[list[Cell]] = [
            [name, split, low, high, count, count / sum(counts)]
            for name, panel in self.panels.items()
            for split, counts in panel.items()
            for (low, high), count in zip(pairwise(self.edges), counts, strict=True)
            if count
        ]
        return FigureNumbers(["posterior", "split", "from", "to", "examples", "share"], rows)

    def draw(self) -> Figure:
        """The panels, side by side, on common axes."""
        from matplotlib.figure import Figure

        rows = math.ceil(len(self.panels) / _COLUMNS)
        columns = math.ceil(len(self.panels) / rows)
        figure = Figure(figsize=(max(PAGE_WIDTH, _PANEL_WIDTH * columns), 1.75 * rows + 0.9), layout="constrained")
        figure.get_layout_engine().set(wspace=0.05)  # type: ignore[union-attr, call-arg]
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        splits = list(dict.fromkeys(name for counts in self.panels.values() for name in counts))
        for axes, (name, counts) in zip(grid, self.panels.items(), strict=False):
            self._draw_panel(axes, counts, splits)
            axes.set_title(name, fontsize="medium", parse_math=False)
        for axes in grid[len(self.panels) :]:
            axes.set_axis_off()
        for axes in grid[max(0, len(self.panels) - columns) : len(self.panels)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("confidence")
        for axes in grid[::columns]:
            axes.set_ylabel("share of examples")
        lines = {line.get_label(): line for axes in grid for line in axes.patches if line.get_label() in splits}
        figure.legend(
            handles=[lines[name] for name in splits if name in lines], loc="outside upper center", ncols=3, frameon=False,
            fontsize="small",
        )  # fmt: skip
        return figure

    def _draw_panel(self, axes: Axes, counts: Mapping[str, Sequence[int]], splits: Sequence[str]) -> None:
        """The first split filled, the others as lines over it."""
        for name, numbers in counts.items():
            shares = [count / (sum(numbers) or 1) for count in numbers]
            if name == self.split:
                axes.stairs(shares, self.edges, fill=True, color=PALE)
            axes.stairs(shares, self.edges, label=name, **line_style(splits.index(name)))
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_ylim(bottom=0)
        plain_axes(axes)
