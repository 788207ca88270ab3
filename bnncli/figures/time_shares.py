"""Where time goes: a bar for each way, of the parts that it takes, to scale, with their seconds in the legend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bnncli.figures.style import plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILLS = (("#0072b2", ""), ("#d55e00", "///"), ("#009e73", "..."), ("#000000", "xxx"))


def draw(rows: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """Bars from the top down; parts of one name have one filling in all of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 1.3 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    for place, part in enumerate(parts):
        color, hatch = _FILLS[place % len(_FILLS)]
        lefts, widths, heights = [], [], []
        for height, row in enumerate(rows.values()):
            if part in row:
                lefts.append(sum(value for name, value in row.items() if parts.index(name) < place))
                widths.append(row[part])
                heights.append(height)
        label = f"{part}, {max(widths):.2g} s"
        axes.barh(heights, widths, left=lefts, height=0.6, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize="large")
    plain_axes(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure
