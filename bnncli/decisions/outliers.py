"""Outlier detection: flag examples that score below almost all in-distribution examples, at a given false-alarm rate.

Conformal p-values: Bates, Candes, Lei, Romano and Sesia (2023), arXiv:2104.08279. The threshold that holds for a share
of calibration sets is a tolerance limit (Wilks 1941).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions.levels import excluding_rank


@dataclass(frozen=True)
class OutlierRule:
    """Flag examples whose score is below the threshold; scores are higher for in-distribution examples."""

    threshold: float

    def is_outlier(self, scores: NDArray) -> NDArray[np.bool_]:
        """Return which of the scores (n,) are outliers, (n,)."""
        found: NDArray[np.bool_] = np.asarray(scores, dtype=np.float64) < self.threshold
        return found


def fit_outliers(scores: NDArray, false_alarm: float, confidence: float | None = None) -> OutlierRule:
    """Fit the rule to in-distribution calibration scores (n,).

    An example is an outlier if its conformal p-value, (1 + number of calibration scores at most its own) / (n + 1), is
    at most the rate.

    Args:
        confidence: share of calibration sets that must each keep the false-alarm rate; None: on average over them.

    Raises:
        ValueError: there are too few examples.
    """
    rank = excluding_rank(len(scores), false_alarm, confidence)
    if rank is None:
        raise ValueError(f"{len(scores)} examples are too few for a false-alarm rate of {false_alarm}")
    return OutlierRule(float(np.partition(np.asarray(scores, dtype=np.float64), rank - 1)[rank - 1]))
