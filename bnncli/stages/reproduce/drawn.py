"""Figures of a recipe that its file asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bnncli.evaluation.agreement import Estimate
from bnncli.figures import agreement, fits
from bnncli.figures.agreement import MarkedNumber, Pair
from bnncli.figures.fits import MeasuredLine
from bnncli.stages.reproduce.formulas import Unmeasured
from bnncli.stages.reproduce.judged import JudgedCell, Numbers
from bnncli.stages.reproduce.recipe import LineFigure, PaperRecipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "numbers"  # the figure of published numbers beside ours


def of_recipe(recipe: PaperRecipe, cells: Sequence[JudgedCell], numbers: Numbers) -> dict[str, Figure]:
    """The figures that have anything to show, by the names of their files."""
    found: dict[str, Figure] = {}
    if any(one.ours is not None for one in cells):
        columns: dict[str, list[Pair]] = {}
        for one in cells:
            columns.setdefault(one.cell.column, []).append(_pair(one))
        panels = [(name, pairs) for name, pairs in columns.items() if any(pair.ours is not None for pair in pairs)]
        found[TABLE] = agreement.draw(panels, title=recipe.title)
    for figure in recipe.figures:
        lines = dict(lines_of(figure, numbers))
        if lines:
            found[figure.name] = fits.draw_measured_lines(
                lines, title=figure.title, x_label=figure.x_label, y_label=figure.y_label, log=figure.log
            )
    return found


def _pair(one: JudgedCell) -> Pair:
    name = f"{one.cell.row} ({one.definition})" if one.definition else one.cell.row
    return Pair(name, _point(one.cell.published), None if one.ours is None else _point(one.ours), one.cell.tolerance)


def _point(one: Estimate) -> MarkedNumber:
    return MarkedNumber(one.value, one.standard_error)


def lines_of(figure: LineFigure, numbers: Numbers) -> Iterator[tuple[str, MeasuredLine]]:
    """Lines with the places at which they were measured."""
    for name, formulas in figure.lines.items():
        points = []
        for x, formula in zip(figure.x, formulas, strict=True):
            try:
                points.append((x, numbers.estimate(formula)))
            except Unmeasured:
                continue
        if points:
            found = [one for _, one in points]
            yield (
                name,
                MeasuredLine(
                    [x for x, _ in points], [one.value for one in found], [one.standard_error for one in found]
                ),
            )


def file_name(name: str) -> str:
    """A figure's name as that of its file."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)
