"""R-hat and effective sample sizes of all parameters of chains, as histograms with what is called good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.figures._lines import line_style, plain_axes
from bnncli.figures.inks import VERMILION
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Histogram(NamedTuple):
    """Counts (B,) of a quantity between edges (B + 1,)."""

    name: str
    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class Mixing:
    """How well chains agree, parameter by parameter.

    Args:
        posterior: its name.
        r_hat: None where it is undefined.
        sizes: effective sample sizes, bulk and tail, between the same edges.
        good_r_hat, good_size: at most and at least what is good.
        num_parameters: how many were judged.
        key: what its name begins with, where a page has several of its kind.
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
        """Of its file."""
        return f"{self.key}mixing-{self.posterior}"

    @property
    def title(self) -> str:
        """In a few words."""
        return f"R-hat and effective sample size of {self.posterior}"

    @property
    def description(self) -> str:
        """How it is read."""
        return (
            f"Histograms over {self.num_parameters:,} parameters. R-hat is 1 if chains agree, and good up to "
            f"{self.good_r_hat:g}. The effective sample size is the number of independent draws that would be as "
            "informative, for the middle (bulk) and for the 5% and 95% quantiles (tail); it is good from "
            f"{self.good_size:g}. Dotted lines mark these limits. The worst parameter decides."
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each bin that holds parameters."""
        rows: list[list[Cell]] = [
            [one.name, low, high, count]
            for one in [*([self.r_hat] if self.r_hat is not None else []), *self.sizes]
            for (low, high), count in zip(pairwise(one.edges), one.counts, strict=True)
            if count
        ]
        return FigureNumbers(["quantity", "from", "to", "parameters"], rows)

    def draw(self) -> Figure:
        """R-hat beside the sample sizes."""
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
