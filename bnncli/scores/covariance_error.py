"""The relative error of the posterior covariance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.reference_distances import Distance


def of_draws() -> Distance:
    """In the Frobenius norm."""
    from bnncli.evaluation.reference_distances import COVARIANCE_ERROR

    return COVARIANCE_ERROR


SCORE = Score(title="covariance error", place=31, digits=3, of_draws=of_draws)
