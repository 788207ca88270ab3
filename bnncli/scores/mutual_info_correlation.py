"""The rank correlation of mutual information with a reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.weighted_scores import ScoreGroup


def of_reference(pair: PredictionPair) -> ScoreGroup:
    """Of the predictions of both."""
    from bnncli.evaluation.fidelity import mutual_info_correlation

    return mutual_info_correlation(pair)


SCORE = Score(
    title="MI rank correlation",
    place=38,
    digits=3,
    is_shown=True,
    told_by=("reference",),
    facts=("floor_undefined", "floor_n"),
    has_floor=True,
    of_reference=of_reference,
)
