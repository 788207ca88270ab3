"""The share of examples whose label is among the k most probable classes; undefined for k classes or fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.evaluation.score_options import ScoreOption
from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredPredictions) -> list[ScoreGroup]:
    """Of the k that is set."""
    from bnncli.evaluation.weighted_scores import NO_LABELS, ScoreForm, ScoreGroup, means

    examples, k = split.examples, split.settings["top_k"]
    members = [ScoreForm("top_k", {"k": k}, True, bounds=(0.0, 1.0))]
    if examples.label_rank is None:
        return [ScoreGroup(members, None, NO_LABELS)]
    if examples.num_classes <= k:
        return [ScoreGroup(members, None, f"only {examples.num_classes} classes")]
    return [means(members, [examples.label_rank < k])]


K = ScoreOption(
    text="k of the top-k accuracy. Undefined for k classes or fewer.",
    default=5,
    minimum=1,
    place=3,
)
SCORE = Score(title="top-{k}", limits=(0, 1), place=2, options={"top_k": K}, of_split=of_split)
