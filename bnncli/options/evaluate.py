"""Options of evaluate, and those of them that score has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.evaluation import detectors
from bnncli.evaluation.scores import declared
from bnncli.options.assertions import Assertion, Quantity, parse_assertion
from bnncli.options.declaration import Checked, collected, option
from bnncli.options.layers import chosen_layers_option
from bnncli.options.of_scores import of_detectors, of_scores
from bnncli.options.predicted import check_variant


def _metrics() -> tuple[str, ...]:
    return tuple(declared())


def _scores() -> tuple[str, ...]:
    return *detectors.of_predictions(), *detectors.of_features(), "all"


@dataclass(frozen=True)
class ShownScores(Checked):
    """Options of commands that score: what they show and assert."""

    metric: list[str] = option(
        [],
        "Show only this score. Exit 65 if it is undefined for every posterior.",
        choices=_metrics,
        numeric=False,
        group="Scores",
    )
    assert_: list[str] = option(
        [],
        "Exit 3 unless this assertion holds, such as ece<=0.02 or nll<map.nll@test. The form is "
        "[POSTERIOR[.INTEGRATOR].]METRIC[-PART][:CHOICE...][@SPLIT], an operator, and a number or another score.",
        metavar="ASSERTION",
        numeric=False,
        group="Scores",
    )
    per_class: bool = option(
        False, "Show the scores of each class in a separate table and in \0json\0.", numeric=False, group="Output"
    )
    intervals: bool = option(
        False, "Show each score as value [low, high], with its bootstrap interval.", numeric=False, group="Output"
    )
    level: float = option(0.95, "Level of the bootstrap intervals.", minimum=0, maximum=1, group="Output", is_rare=True)

    def check_intervals(self, replicates: int | None) -> None:
        """Raise UsageError for a wrong assertion or level, or where intervals are asked for and there are none."""
        sides = [side for one in self.assertions for side in (one.left, one.right) if isinstance(side, Quantity)]
        if self.level in (0, 1):
            raise UsageError(f"\0level\0: expected a number between 0 and 1; got {self.level}")
        if replicates == 0 and any(side.part in ("low", "high") for side in sides):
            raise UsageError("\0assert_\0: \0bootstrap\0 0 computes no intervals")
        if self.intervals and replicates == 0:
            raise UsageError("\0intervals\0: \0bootstrap\0 0 computes no intervals")

    @property
    def assertions(self) -> list[Assertion]:
        """What \0assert_\0 asks for."""
        return [parse_assertion(text, "\0assert_\0", _metrics()) for text in self.assert_]


@dataclass(frozen=True)
class EvaluateOptions(ShownScores):
    """Options of evaluate, `settings` being those that scores bring, `detector_settings` those that scores of examples do."""

    posterior: list[str] = option(
        [], "Score only this posterior's predictions.", metavar="NAME", numeric=False, group="What to score"
    )
    layers: str | None = chosen_layers_option("What to score")
    integrator: list[str] = option(
        [],
        "Score only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
        group="What to score",
    )
    split: list[str] = option(
        [], "Score only this in-distribution split.", metavar="SPLIT", numeric=False, group="What to score"
    )
    plot: str | None = option(
        None,
        "Draw reliability diagrams, risk-coverage curves and ROC curves as PNG files in this folder.",
        metavar="DIR",
        writes=True,
        numeric=False,
        group="Output",
    )
    curves: bool = option(
        False,
        "Add the points of these curves to \0json\0, at most 200 per curve.",
        numeric=False,
        group="Output",
        is_rare=True,
    )
    score: list[str] = option(
        [],
        "Score that detects out-of-distribution examples, from predictions or features. Default: combined, else "
        "mutual_info or max_prob.",
        choices=_scores,
        group="Scores",
    )
    detector_settings: dict[str, Any] = collected(of_detectors, numeric=False)
    reference: str | None = option(
        None,
        "Compare all predictions with those of this posterior (hmc, hmc.mc) or file: agreement, divergences, "
        "rank correlation. Default: hmc for distances between draws.",
        metavar="NAME|FILE[:ARRAY]",
        numeric=False,
        group="Scores",
        is_rare=True,
    )
    settings: dict[str, Any] = collected(of_scores)
    bootstrap: int = option(
        1000,
        "Number of bootstrap replicates over examples, for standard errors and intervals. 0 turns both off.",
        minimum=0,
        group="Scores",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_intervals(self.bootstrap)

    @property
    def shown_scores(self) -> list[str]:
        """The detection scores to show."""
        every = [*detectors.of_predictions(), *detectors.of_features()]
        return (
            every
            if "all" in self.score
            else [name for name in every if name in self.score] or [detectors.DEFAULT_SCORE]
        )

    @property
    def prediction_scores(self) -> list[str]:
        """The detection scores to make of every group of predictions: the default, and those to show."""
        return [name for name in detectors.of_predictions() if name in (detectors.DEFAULT_SCORE, *self.shown_scores)]

    @property
    def curve_score(self) -> str:
        """The score of predictions that ROC curves go by: the first to show, else the default."""
        return next((name for name in detectors.of_predictions() if name in self.shown_scores), detectors.DEFAULT_SCORE)

    @property
    def needs_features(self) -> bool:
        """Whether a score of the features is to be shown."""
        return not set(detectors.of_features()).isdisjoint(self.shown_scores)
