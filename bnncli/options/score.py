"""Options of score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli import detectors
from bnncli.errors import UsageError
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
        "Labels, where they are not with the predictions: a column or array of another file, in the order of its rows.",
        metavar="FILE[:COLUMN]",
    )
    logits: bool = option(False, "The predictions are logits, where that cannot be told from their name or values.")
    probabilities: bool = option(False, "The predictions are probabilities, where that cannot be told.")
    task: str | None = option(
        None,
        "What the labels are: of several classes, of two, or several an example (multilabel), where that cannot be told.",
        choices=TASKS,
    )
    groups: str | None = option(
        None,
        "Column of group names, in the file or another one: adds a table with a row a group.",
        metavar="[FILE:]COLUMN",
    )
    ood: list[str] = option(
        [],
        "Predictions outside the distribution, told from the others by scores of each example. Labels in it are not used. Repeatable.",
        metavar="[NAME=]FILE",
    )
    score: list[str] = option(
        [],
        "Tell \0ood\0 apart by this score of each example (combined otherwise, of prediction files that have it, else mutual_info or "
        "max_prob). Repeatable.",
        choices=_scores,
    )
    reference: str | None = option(
        None,
        "Hold the predictions against those of this file, of the same rows in the same order: agreement, total variation, "
        "Jensen-Shannon divergence, rank correlation of mutual information. Soft labels are a reference too.",
        metavar="FILE[:ARRAY]",
    )
    split: str = option(
        "test",
        "What the split is called, in assertions; prediction files of predict say it themselves.",
        metavar="NAME",
    )
    settings: dict[str, Any] = collected(of_predicted_scores)
    bootstrap: int | None = option(
        None,
        f"Bootstrap replicates of standard errors and intervals, over examples; {REPLICATES} by default, none of more than {MOST_ROWS} rows, where they take minutes.",
        minimum=0,
    )
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    plot: str | None = option(
        None, "Draw a reliability diagram, and one of each group, as .png, .svg or .pdf.", metavar="FILE", writes=True
    )
    force: bool = option(False, "Let \0plot\0 replace a file that is no figure of bnncli.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
        self.check_intervals(self.bootstrap)
        if self.logits and self.probabilities:
            raise UsageError("\0logits\0 and \0probabilities\0 exclude each other: give one")
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
