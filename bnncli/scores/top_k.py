"""The share of examples whose label is among the k most probable classes; undefined for k classes or fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.scored_split import ScoredSplit
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_split(split: ScoredSplit) -> list[ScoreGroup]:
    """Of the k of the split."""
    from bnncli.evaluation.weighted_scores import NO_LABELS, ScoreForm, ScoreGroup, means

    examples, k = split.examples, split.top_k
    members = [ScoreForm("top_k", {"k": k}, True, bounds=(0.0, 1.0))]
    if examples.label_rank is None:
        return [ScoreGroup(members, None, NO_LABELS)]
    if examples.num_classes <= k:
        return [ScoreGroup(members, None, f"there are {examples.num_classes} classes")]
    return [means(members, [examples.label_rank < k])]


SCORE = Score(title="top-{k}", place=2, of_split=of_split)
