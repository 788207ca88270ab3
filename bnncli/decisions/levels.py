"""Conformal thresholds: the rank of the calibration score that gives an exact level, and the sample size this takes.

If n continuous scores are exchangeable with a new one, the new one is at most the k-th smallest with probability k/(n +
1). Given the n scores, this probability is distributed Beta(k, n + 1 - k) (Vovk 2012, arXiv:1209.2673). Ties only
increase it.
"""

from __future__ import annotations

import math
from fractions import Fraction

from bnncli.lazy import special


def covering_rank(num_scores: int, coverage: float, confidence: float | None = None) -> int | None:
    """Return the smallest k such that scores up to the k-th smallest have the coverage; None if no k does.

    Args:
        coverage: in (0, 1).
        confidence: share of calibration sets that must each reach the coverage. None: reach it on average over
            calibration sets, k = ceil((n + 1) coverage).
    """
    if confidence is None:
        rank = math.ceil((num_scores + 1) * exact(coverage))
        return rank if rank <= num_scores else None
    low, high = 1, num_scores + 1  # coverage grows with k
    while low < high:
        middle = (low + high) // 2
        has_it = float(special.bdtr(middle - 1, num_scores, coverage)) >= confidence
        low, high = (low, middle) if has_it else (middle + 1, high)
    return low if low <= num_scores else None


def excluding_rank(num_scores: int, rate: float, confidence: float | None = None) -> int | None:
    """Return the largest k such that scores below the k-th smallest have at most this rate; None if no k does.

    Args:
        rate: in (0, 1).
        confidence: share of calibration sets that must each keep the rate. None: keep it on average over calibration
            sets, k = floor((n + 1) rate).
    """
    if confidence is None:
        return math.floor((num_scores + 1) * exact(rate)) or None
    low, high = 0, num_scores  # the rate grows with k
    while low < high:
        middle = (low + high + 1) // 2
        has_it = float(special.betainc(middle, num_scores + 1 - middle, rate)) >= confidence
        low, high = (middle, high) if has_it else (low, middle - 1)
    return low or None


def least_for_coverage(coverage: float, confidence: float | None = None) -> int:
    """Return the number of scores needed for a threshold of this coverage."""
    return _least(1 - exact(coverage), confidence)


def least_for_rate(rate: float, confidence: float | None = None) -> int:
    """Return the number of scores needed for a threshold of this false-alarm rate."""
    return _least(exact(rate), confidence)


def _least(missed: Fraction, confidence: float | None) -> int:
    """Return the smallest n such that the largest (or smallest) score excludes at most this share of new scores."""
    if confidence is None:
        return math.ceil(1 / missed) - 1
    least = max(1, math.floor(math.log1p(-confidence) / math.log1p(-float(missed))))
    while -math.expm1(least * math.log1p(-float(missed))) < confidence:  # at most one step, due to rounded logarithms
        least += 1
    return least


def exact(level: float) -> Fraction:
    """Return the level as the decimal number the user typed, so that rounding never shifts (n + 1) 0.1 by a rank."""
    return Fraction(repr(float(level)))
