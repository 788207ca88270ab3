"""The mean mutual information of class and parameters, nats; needs draws."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """Of predictions that have it."""
    from bnncli.evaluation.weighted_scores import ScoreForm, ScoreGroup, means

    members = [ScoreForm("mean_mutual_info", {}, None)]
    if split.mutual_info is None:
        return [ScoreGroup(members, None, "the integrator uses no draws")]
    return [means(members, [split.mutual_info])]


SCORE = Score(title="mutual information", limits=(0, inf), place=19, of_split=of_split, of_labels=of_split)
