"""Options of evaluate, and those of them that score has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli import detectors
from bnncli.errors import UsageError
from bnncli.options.assertions import Assertion, Quantity, parse_assertion
from bnncli.options.declaration import Checked, collected, option
from bnncli.options.layers import chosen_layers_option
from bnncli.options.of_scores import of_detectors, of_scores
from bnncli.options.predicted import check_variant
from bnncli.scores import declared


def _metrics() -> tuple[str, ...]:
    return tuple(declared())


def _scores() -> tuple[str, ...]:
    return *detectors.of_predictions(), *detectors.of_features(), "all"


FEATURES_NAME = "features"  # stands where a posterior's name does, for scores of the features alone


@dataclass(frozen=True)
class ShownScores(Checked):
    """Options of commands that score: what they show and assert."""

    metric: list[str] = option(
        [],
        "Show only this score, in all its forms, and fail (65) where it is undefined for every posterior. Repeatable.",
        choices=_metrics,
        numeric=False,
    )
    assert_: list[str] = option(
        [],
        "Exit 3 unless this holds, as ece<=0.02, laplace.mc.auroc:mnist>=0.9 or nll<map.nll@test: [POSTERIOR[.INTEGRATOR].]METRIC[-PART][:CHOICE...][@SPLIT], an operator, a number or another score. PART: low or high, an end of the interval (ece-low<=0.02 fails where the error is surely larger); of ece and mce excess, the value less what a calibrated model of as many examples scores, and floor, that. Without a posterior every one of the run is meant, and one that is stale or not predicted fails. Repeatable.",
        metavar="ASSERTION",
        numeric=False,
    )
    per_class: bool = option(
        False,
        "Show the scores of every class in a table of their own, and in the rows of \0json\0: recall (of balanced_accuracy), F1, precision, and the AUROC and average precision of the class against the rest; of several labels an example, NLL, Brier score, ECE and share of errors of each too.",
        numeric=False,
    )
    intervals: bool = option(False, "Show each score with its bootstrap interval: value [low, high].", numeric=False)
    level: float = option(0.95, "Level of the bootstrap intervals, between 0 and 1.", minimum=0, maximum=1)

    def check_intervals(self, replicates: int | None) -> None:
        """Raise UsageError for a wrong assertion or level, or where intervals are asked for and there are none."""
        sides = [side for one in self.assertions for side in (one.left, one.right) if isinstance(side, Quantity)]
        if self.level in (0, 1):
            raise UsageError(f"\0level\0: expected a number between 0 and 1; got {self.level}")
        if replicates == 0 and any(side.part in ("low", "high") for side in sides):
            raise UsageError("\0assert_\0: there are no intervals with \0bootstrap\0 0")
        if self.intervals and replicates == 0:
            raise UsageError("\0intervals\0: there are none with \0bootstrap\0 0")

    @property
    def assertions(self) -> list[Assertion]:
        """What \0assert_\0 asks for."""
        return [parse_assertion(text, "\0assert_\0", _metrics()) for text in self.assert_]


@dataclass(frozen=True)
class EvaluateOptions(ShownScores):
    """Options of evaluate, `settings` being those that scores bring, `detector_settings` those that scores of examples do."""

    posterior: list[str] = option([], "Only this posterior's predictions. Repeatable.", metavar="NAME", numeric=False)
    layers: str | None = chosen_layers_option()
    integrator: list[str] = option(
        [],
        "Only this integrator's predictions: a name (mc), or one with its settings (mc-qmc). Repeatable.",
        metavar="NAME",
        check=check_variant,
        numeric=False,
    )
    split: list[str] = option([], "Only this in-distribution split. Repeatable.", metavar="SPLIT", numeric=False)
    plot: str | None = option(
        None,
        "Draw reliability diagrams, risk-coverage and ROC curves into this folder, a PNG for each split.",
        metavar="DIR",
        writes=True,
        numeric=False,
    )
    curves: bool = option(False, "Add these curves to the rows of \0json\0, at most 200 points each.", numeric=False)
    score: list[str] = option(
        [],
        "Detect out-of-distribution splits by this score of the predictions (combined otherwise, or what stands in where they "
        "lack it: mutual_info, max_prob), or of the features (mahalanobis, relative_mahalanobis, knn). Repeatable.",
        choices=_scores,
    )
    detector_settings: dict[str, Any] = collected(of_detectors, numeric=False)
    reference: str | None = option(
        None,
        "Hold all predictions against those of this posterior of the run (hmc, or hmc.mc), or of a file as score takes it (FILE:ARRAY): "
        "agreement, total variation, Jensen-Shannon divergence, rank correlation of mutual information. Draws of it are what MMD^2 and "
        "other distances are measured to; without this option, or where it has none, those of hmc (of posteriors over other layers "
        "those that hmc makes of the same layers, hmc-all).",
        metavar="NAME|FILE[:ARRAY]",
        numeric=False,
    )
    settings: dict[str, Any] = collected(of_scores)
    bootstrap: int = option(
        1000, "Bootstrap replicates of standard errors and intervals, over examples; 0 for none.", minimum=0
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
