"""What commands leave: tables, figures, posteriors, and what they say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from bnncli.progress import SilentProgress


def table_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table in CSV, by column."""
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def figure_texts(figure: Any) -> str:
    """Every text of a figure, a line each."""
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


def posterior_file(run: Path, name: str) -> Path:
    """Where a posterior of tensors lies."""
    return run.with_name(f"{run.name}.bnn") / f"posteriors/{name}.safetensors"


class Told(SilentProgress):
    """Keep what progress is told: names and totals of tasks, steps, and warnings."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[tuple[str, int]] = []
        self.steps: list[int] = []

    def task(self, name: str, total: int) -> Told:
        self.tasks.append((name, total))
        return self

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.steps.append(amount)

    def warn(self, text: str) -> None:
        self.lines.append(text)
