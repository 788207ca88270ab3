"""The squared maximum mean discrepancy between draws and those of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.reference_distances import Distance


def of_draws() -> Distance:
    """Unbiased with its test, biased, and as published."""
    from bnncli.evaluation.reference_distances import MMD2

    return MMD2


SCORE = Score(
    title="MMD^2",
    place=28,
    is_shown=True,
    usual={"estimator": "unbiased"},
    told_by=("estimator",),
    facts=("bandwidth_rule", "p_value_undefined", "permutations", "blocks"),
    of_draws=of_draws,
)
