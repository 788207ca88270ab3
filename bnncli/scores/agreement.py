"""The share of examples for which a reference predicts the same class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_reference(pair: PredictionPair) -> ScoreGroup:
    """Of the predictions of both."""
    from bnncli.evaluation.fidelity import agreement

    return agreement(pair)


SCORE = Score(
    title="agreement",
    limits=(0, 1),
    place=35,
    digits=4,
    is_shown=True,
    told_by=("reference",),
    facts=("floor_undefined", "floor_n"),
    has_floor=True,
    note="agreement: predicts the same class as the reference; TV: half the L1 distance; JSD in nats; floor: the "
    "value between halves of its draws",
    of_reference=of_reference,
)
