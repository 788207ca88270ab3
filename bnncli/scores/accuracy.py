"""The share of examples whose label is the most probable class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """Accuracy, NLL and Brier score: one product with the weights makes all three."""
    from bnncli.evaluation.weighted_scores import label_scores

    return label_scores(split.examples)


SCORE = Score(title="accuracy", place=1, is_shown=True, of_split=of_split)
