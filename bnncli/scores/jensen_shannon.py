"""The mean Jensen-Shannon divergence from a reference's probabilities, nats."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_reference(pair: PredictionPair) -> ScoreGroup:
    """Of the predictions of both."""
    from bnncli.evaluation.fidelity import jensen_shannon

    return jensen_shannon(pair)


SCORE = Score(
    title="JSD",
    limits=(0, inf),
    place=37,
    digits=4,
    is_shown=True,
    told_by=("reference",),
    facts=("floor_undefined", "floor_n"),
    has_floor=True,
    of_reference=of_reference,
)
