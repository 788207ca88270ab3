"""Scores of the posteriors of one checkpoint with their intervals: a panel for each score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.figures.comparison import ScorePanel, draw
from bnncli.figures.shown import Cell, FigureNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ScoreIntervals:
    """Scores side by side.

    Args:
        key: of the file, letters and dashes.
        names: of the posteriors, one for each line of every panel.
        panels: as figures.comparison draws them.
        title: what is compared, and on what.
        explained: what dots, lines and marks are, a sentence.
        marked, plain, tests: what marks tell apart, and by which test; without, nothing is told apart.
    """

    key: str
    names: Sequence[str]
    panels: Sequence[ScorePanel]
    title: str
    explained: str
    marked: str | None = None
    plain: str = ""
    tests: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        return self.key

    @property
    def description(self) -> str:
        """How it is read."""
        return f"One panel per score: a mark for each posterior's score on a line for its interval. {self.explained}"

    @property
    def numbers(self) -> FigureNumbers:
        """A row for each posterior and score."""
        rows: list[list[Cell]] = []
        for panel in self.panels:
            for name, line in zip(self.names, panel.lines, strict=True):
                low, high = line.interval or (None, None)
                rows.append([" ".join(panel.title.split()), name, line.value, low, high])
        return FigureNumbers(["score", "posterior", "value", "low", "high"], rows)

    def draw(self) -> Figure:
        """The panels, side by side."""
        return draw(
            self.panels, self.names, title=self.title, marked=self.marked, plain=self.plain, tests=self.tests, most_columns=3,
            panel_width=2.3,
        )  # fmt: skip
