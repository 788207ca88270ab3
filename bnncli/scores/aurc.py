"""The area under the risk-coverage curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """AURC and E-AURC."""
    from bnncli.evaluation.selective_prediction import selective_scores

    return [selective_scores(split.examples)]


SCORE = Score(title="AURC", limits=(0, 1), place=12, of_split=of_split)
