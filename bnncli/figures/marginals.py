"""Marginal densities of single weights, of every posterior over that of a reference; after figures 9 to 11 of Kristiadi et al. (2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures._lines import line_style, plain_axes
from bnncli.figures.inks import GREY, PALE
from bnncli.figures.shown import PAGE_WIDTH, Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2


class Marginal(NamedTuple):
    """One weight: what it is called, where its densities are given (G,), those by posterior (G,), and the values of points."""

    title: str
    grid: Sequence[float]
    densities: Mapping[str, Sequence[float]]
    points: Mapping[str, float]


@dataclass(frozen=True)
class Marginals:
    """Densities of weights.

    Args:
        marginals: a panel each; the reference is among the densities of each.
        reference: the posterior that the others are held against; None where there is none.
        chosen: how the weights were chosen, a sentence.
        is_reference_good: whether the reference can be relied on.
        key: what its name begins with, where a page has several of its kind.
    """

    marginals: Sequence[Marginal]
    reference: str | None
    chosen: str
    is_reference_good: bool = True
    key: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.key}marginals"

    @property
    def title(self) -> str:
        """In a few words."""
        return "Densities of single weights" + (f", over those of {self.reference}" if self.reference else "")

    @property
    def description(self) -> str:
        """How it is read."""
        role = (
            "which the others should match"
            if self.is_reference_good
            else "which has not converged and is only a rough guide"
        )
        filled = f" Grey: {self.reference}, {role}." if self.reference else ""
        points = " Vertical lines: posteriors with a single value." if any(one.points for one in self.marginals) else ""
        return (
            f"Densities of single weights under each posterior, estimated from its draws.{filled}{points} {self.chosen}"
        )

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each value of each weight, a column for each posterior; points with no density."""
        names = list(dict.fromkeys(name for one in self.marginals for name in one.densities))
        rows: list[list[Cell]] = []
        for one in self.marginals:
            for place, value in enumerate(one.grid):
                rows.append(
                    [one.title, value, *(one.densities[n][place] if n in one.densities else None for n in names)]
                )
            rows += [[f"{one.title}, {name}", value, *[None] * len(names)] for name, value in one.points.items()]
        return FigureNumbers(["weight", "value", *names], rows)

    def draw(self) -> Figure:
        """The panels, two beside each other, with one legend."""
        from matplotlib.figure import Figure

        rows = math.ceil(len(self.marginals) / _COLUMNS)
        columns = min(_COLUMNS, len(self.marginals))
        figure = Figure(figsize=(PAGE_WIDTH, 1.9 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        names = list(dict.fromkeys(name for one in self.marginals for name in (*one.densities, *one.points)))
        handles: dict[str, Artist] = {}
        for axes, one in zip(grid, self.marginals, strict=False):
            handles |= self._draw_panel(axes, one, names)
        for axes in grid[len(self.marginals) :]:
            axes.set_axis_off()
        figure.legend(
            handles=[handles[name] for name in names if name in handles], loc="outside upper center", ncols=3, frameon=False,
            fontsize="small",
        )  # fmt: skip
        return figure

    def _draw_panel(self, axes: Axes, one: Marginal, names: Sequence[str]) -> dict[str, Artist]:
        """The lines by posterior."""
        found: dict[str, Artist] = {}
        for name, density in one.densities.items():
            style = line_style(names.index(name))
            if name == self.reference:
                axes.fill_between(one.grid, density, color=PALE, linewidth=0)
                style = {"color": GREY, "linestyle": "-", "linewidth": 1.5}
            (found[name],) = axes.plot(one.grid, density, label=name, **style)
        for name, value in one.points.items():
            if one.grid[0] <= value <= one.grid[-1]:
                found[name] = axes.axvline(value, label=name, **{**line_style(names.index(name)), "linewidth": 1.0})
        axes.set_title(one.title, fontsize="small", parse_math=False)
        axes.set_ylim(bottom=0)
        axes.set_yticks([])
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(labelsize="small")
        plain_axes(axes)
        axes.spines["left"].set_visible(False)
        return found
