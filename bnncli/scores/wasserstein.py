"""The 1-Wasserstein distance between the marginals of draws and those of the reference."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.reference_distances import Distance


def of_draws() -> Distance:
    """Its mean and its largest value over the parameters."""
    from bnncli.evaluation.reference_distances import WASSERSTEIN

    return WASSERSTEIN


SCORE = Score(
    title="Wasserstein",
    limits=(0, inf),
    place=29,
    digits=3,
    usual={"over": "mean"},
    told_by=("over",),
    of_draws=of_draws,
)
