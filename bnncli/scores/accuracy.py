"""The share of examples whose label is the most probable class; with several labels, the share with every label right."""

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


def of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """Accuracy of whole examples, Hamming loss, NLL and Brier score of all decisions."""
    from bnncli.evaluation.label_scores import decision_scores

    return decision_scores(split.probs, split.examples)


SCORE = Score(title="accuracy", limits=(0, 1), place=1, is_shown=True, of_split=of_split, of_labels=of_labels)
