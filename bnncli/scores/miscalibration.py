"""The part of the Brier score or NLL of two classes that recalibration would remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """The three parts of the Brier score and of the NLL."""
    from bnncli.evaluation.decomposition import decomposition_scores

    return [decomposition_scores(split.examples)]


SCORE = Score(title="miscalibration", place=14, told_by=("of",), of_split=of_split)
