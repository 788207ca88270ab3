"""The mean number of classes that the uncertainty-aware ranking keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """All scores of the ranking."""
    from bnncli.evaluation.ranking import ranking_scores

    return ranking_scores(split.probs, split.examples, split.lengths, split.ranking)


SCORE = Score(title="classes kept", place=20, digits=3, told_by=("rule",), facts=("threshold",), of_split=of_split)
