"""Outliers: examples whose score is lower than almost all of in-distribution ones, at a stated rate of false alarms.

Conformal p-values of outliers: Bates, Candes, Lei, Romano and Sesia (2023), arXiv:2104.08279. The threshold for a share of
calibration sets is a tolerance limit (Wilks 1941).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions.levels import excluding_rank


@dataclass(frozen=True)
class OutlierRule:
    """Which examples are outliers: those whose score, higher for what looks in-distribution, is below the threshold."""

    threshold: float

    def is_outlier(self, scores: NDArray) -> NDArray[np.bool_]:
        """(n,) of scores (n,)."""
        found: NDArray[np.bool_] = np.asarray(scores, dtype=np.float64) < self.threshold
        return found


def fit_outliers(scores: NDArray, false_alarm: float, confidence: float | None = None) -> OutlierRule:
    """The rule of calibration scores (n,), which are in-distribution.

    An example is an outlier where its conformal p-value, (1 + how many scores are at most its own) / (n + 1), is at most the rate.

    Args:
        confidence: share of calibration sets whose false-alarm rate shall be at most this; None: on average over them.

    Raises:
        ValueError: too few examples.
    """
    rank = excluding_rank(len(scores), false_alarm, confidence)
    if rank is None:
        raise ValueError(f"{len(scores)} examples are too few for a false-alarm rate of {false_alarm}")
    return OutlierRule(float(np.partition(np.asarray(scores, dtype=np.float64), rank - 1)[rank - 1]))
