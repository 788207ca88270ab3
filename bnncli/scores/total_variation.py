"""The mean total variation distance to a reference's probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_reference(pair: PredictionPair) -> ScoreGroup:
    """Of the predictions of both."""
    from bnncli.evaluation.fidelity import total_variation

    return total_variation(pair)


SCORE = Score(
    title="TV",
    limits=(0, 1),
    place=36,
    digits=4,
    is_shown=True,
    told_by=("reference",),
    facts=("floor_undefined", "floor_n"),
    has_floor=True,
    of_reference=of_reference,
)
