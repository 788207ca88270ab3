"""The expected calibration error: binned by confidence, in three ways, and class by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_split import ScoredSplit
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredSplit) -> list[ScoreGroup]:
    """ECE and MCE of the largest probability, and the class-wise ECE."""
    from bnncli.evaluation.calibration import calibration_scores
    from bnncli.evaluation.class_wise import class_wise_scores

    groups = calibration_scores(split.examples, num_bins=split.num_bins)
    return [*groups, class_wise_scores(split.probs, split.examples.labels, num_bins=split.num_bins)]


SCORE = Score(
    title="ECE",
    place=5,
    is_shown=True,
    usual={"strategy": "equal-width", "norm": "l1"},
    told_by=("strategy", "norm", "estimator"),
    facts=("num_used",),
    has_floor=True,
    of_split=of_split,
)
