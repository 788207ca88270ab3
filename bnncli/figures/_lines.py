"""How lines, axes and grids of overlaid curves look: told apart by dash as well as by colour, so that grey print works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from bnncli.figures.inks import BLUE, GREEN, GREY, INK, PALE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours that are dark enough on white, from dark to light, so that they differ in grey as well.
_COLORS = (INK, BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 1.5, 1.5, 1.5)), (0, (1, 1)))
_LEGEND_LINE = 0.18  # inches, in small type
__all__ = ["GREY", "PALE", "legend_of", "line_style", "plain_axes"]


def line_style(place: int) -> dict[str, Any]:
    """Colour and dash of the curve at `place`; they repeat together after 35."""
    return {"color": _COLORS[place % len(_COLORS)], "linestyle": _DASHES[place % len(_DASHES)], "linewidth": 1.5}


def plain_axes(axes: Axes) -> None:
    """A pale grid below the curves, and no frame but the two axes."""
    axes.grid(visible=True, which="major", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_of(axes: Axes, num_curves: int, title: str, loc: Literal["best", "lower right"] = "best") -> None:
    """A legend inside the axes, at `loc`, by default where it covers least; beside them, in room of its own, where it would be too long for that."""
    if num_curves <= 8:
        axes.legend(
            frameon=True,
            framealpha=0.9,
            edgecolor="none",
            fontsize="small",
            title=title,
            title_fontsize="small",
            loc=loc,
        )
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(max(figure.get_figheight(), 0.6 + _LEGEND_LINE * num_curves))
    figure.legend(frameon=False, fontsize="small", title=title, title_fontsize="small", loc="outside right upper")
