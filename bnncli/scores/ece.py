"""The expected calibration error: binned by confidence, in three ways, and class by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.evaluation.score_options import ScoreOption
from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """ECE and MCE of the largest probability, and the class-wise ECE."""
    from bnncli.evaluation.calibration import calibration_scores
    from bnncli.evaluation.class_wise import class_wise_scores

    num_bins = split.settings["bins"]
    groups = calibration_scores(split.examples, num_bins=num_bins)
    return [*groups, class_wise_scores(split.probs, split.examples.labels, num_bins=num_bins)]


def of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """ECE of all decisions in one, and the mean over the labels of the ECE of each."""
    from bnncli.evaluation.class_wise import class_wise_scores
    from bnncli.evaluation.label_calibration import pooled_calibration

    assert split.examples.of_labels is not None
    labels, num_bins = split.examples.of_labels.labels, split.settings["bins"]
    pooled = pooled_calibration(split.probs, labels, num_bins=num_bins)
    return [pooled, class_wise_scores(split.probs, labels, num_bins=num_bins)]


BINS = ScoreOption(
    text="Number of bins for ECE and MCE.",
    in_compare="Number of bins for calibration errors.",
    default=15,
    minimum=1,
    maximum=100_000,
    place=2,
)  # the usual choice since Guo et al. (2017)


SCORE = Score(
    title="ECE",
    limits=(0, 1),
    place=5,
    is_shown=True,
    usual={"strategy": "equal-width", "norm": "l1"},
    told_by=("strategy", "norm", "estimator"),
    facts=("num_used",),
    has_floor=True,
    options={"bins": BINS},
    of_split=of_split,
    of_labels=of_labels,
)
