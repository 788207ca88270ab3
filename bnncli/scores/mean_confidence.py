"""The mean of the largest probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """Mean confidence and entropy."""
    from bnncli.evaluation.weighted_scores import confidence_scores

    return confidence_scores(split.examples)


def of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """Mean entropy, the sum over the labels of each."""
    from bnncli.evaluation.weighted_scores import entropy_score

    return [entropy_score(split.examples)]


SCORE = Score(title="confidence", limits=(0, 1), place=17, of_split=of_split, of_labels=of_labels)
