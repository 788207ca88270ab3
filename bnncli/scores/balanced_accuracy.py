"""The mean over classes of the recall of a class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """All means over classes."""
    from bnncli.evaluation.per_class import per_class_scores

    return per_class_scores(split.probs, split.examples)


def of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """All means over labels, and rankings of all decisions in one."""
    from bnncli.evaluation.label_scores import label_by_label_scores

    return label_by_label_scores(split.probs, split.examples)


SCORE = Score(
    title="balanced accuracy", limits=(0, 1), place=7, facts=("num_left_out",), of_split=of_split, of_labels=of_labels
)
