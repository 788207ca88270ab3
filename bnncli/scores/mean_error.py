"""The error of the posterior mean, in standard deviations of the reference's draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.reference_distances import Distance


def of_draws() -> Distance:
    """Root mean square over the parameters."""
    from bnncli.evaluation.reference_distances import MEAN_ERROR

    return MEAN_ERROR


SCORE = Score(title="mean error", place=30, digits=3, of_draws=of_draws)
