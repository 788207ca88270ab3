"""Options of score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.evaluation import detectors
from bnncli.likelihoods import TASKS
from bnncli.options.declaration import check_split_name, check_suffix, collected, option
from bnncli.options.evaluate import ShownScores
from bnncli.options.of_scores import of_predicted_scores

REPLICATES = 1000  # of the bootstrap where nothing is said, up to MOST_ROWS
MOST_ROWS = 100_000  # a thousand replicates of more take minutes, and intervals of so many are narrow


def _scores() -> tuple[str, ...]:
    return *detectors.of_predictions(), "all"


@dataclass(frozen=True)
class ScoreOptions(ShownScores):
    """Options of score, `settings` being those that scores bring."""

    labels: str | None = option(
        None,
        "Read the labels from another file: a column or array in the same order.",
        metavar="FILE[:COLUMN]",
        group="Predictions",
    )
    logits: bool = option(False, "Treat the predictions as logits. Default: inferred.", group="Predictions")
    probabilities: bool = option(
        False, "Treat the predictions as probabilities. Default: inferred.", group="Predictions"
    )
    task: str | None = option(
        None, "Type of the labels. Default: inferred.", choices=TASKS, group="Predictions", is_rare=True
    )
    groups: str | None = option(
        None,
        "Column that holds group names. Adds a table with one row per group.",
        metavar="[FILE:]COLUMN",
        group="Predictions",
    )
    ood: list[str] = option(
        [],
        "File of out-of-distribution predictions. Its labels are ignored.",
        metavar="[NAME=]FILE",
        group="Predictions",
    )
    score: list[str] = option(
        [],
        "Score that detects the examples of \0ood\0. Default: combined, else mutual_info or max_prob.",
        choices=_scores,
        group="Scores",
    )
    reference: str | None = option(
        None,
        "Compare with the predictions in this file (same rows): agreement, divergences, rank correlation. Soft "
        "labels work too.",
        metavar="FILE[:ARRAY]",
        group="Scores",
        is_rare=True,
    )
    split: str = option(
        "test",
        "Name of the split in assertions. Files written by predict name their own split.",
        metavar="NAME",
        group="Predictions",
        is_rare=True,
    )
    settings: dict[str, Any] = collected(of_predicted_scores)
    bootstrap: int | None = option(
        None,
        f"Number of bootstrap replicates over examples. Default: {REPLICATES}, or 0 above {MOST_ROWS} rows.",
        minimum=0,
        group="Scores",
        is_rare=True,
    )
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    plot: str | None = option(
        None,
        "Plot a reliability diagram, and one per group, as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
        group="Output",
    )
    force: bool = option(False, "Let \0plot\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
        self.check_intervals(self.bootstrap)
        if self.logits and self.probabilities:
            raise UsageError("\0logits\0 and \0probabilities\0 are mutually exclusive: give one of them")
        check_split_name(self.split, "\0split\0")

    @property
    def shown_scores(self) -> list[str]:
        """The detection scores to show."""
        every = detectors.of_predictions()
        return (
            every
            if "all" in self.score
            else [name for name in every if name in self.score] or [detectors.DEFAULT_SCORE]
        )

    @property
    def made_scores(self) -> list[str]:
        """The detection scores to make: the default, and those to show."""
        return [name for name in detectors.of_predictions() if name in (detectors.DEFAULT_SCORE, *self.shown_scores)]

    def replicates(self, num_rows: int) -> int:
        """Bootstrap replicates for so many rows."""
        if self.bootstrap is None:
            return REPLICATES if num_rows <= MOST_ROWS else 0
        return self.bootstrap
