"""Which of the sorted calibration scores a threshold is, so that its level holds exactly; and how many examples that takes.

Of n continuous scores that are exchangeable with a new one, the k-th smallest is at least the new one with probability k/(n + 1).
Given the n, that share is distributed Beta(k, n + 1 - k) (Vovk 2012, arXiv:1209.2673). Ties make both larger.
"""

from __future__ import annotations

import math
from fractions import Fraction

from bnncli.lazy import special


def covering_rank(num_scores: int, coverage: float, confidence: float | None = None) -> int | None:
    """The smallest k for which scores up to the k-th smallest have the coverage; None where even the largest has not.

    Args:
        coverage: in (0, 1), on average over calibration sets: k is ceil((n + 1) coverage).
        confidence: share of calibration sets that shall have it each; None: on average.
    """
    if confidence is None:
        rank = math.ceil((num_scores + 1) * exact(coverage))
        return rank if rank <= num_scores else None
    low, high = 1, num_scores + 1  # the share grows with k
    while low < high:
        middle = (low + high) // 2
        has_it = float(special.bdtr(middle - 1, num_scores, coverage)) >= confidence
        low, high = (low, middle) if has_it else (middle + 1, high)
    return low if low <= num_scores else None


def excluding_rank(num_scores: int, rate: float, confidence: float | None = None) -> int | None:
    """The largest k for which scores below the k-th smallest have at most this rate; None where there is none.

    Args:
        rate: in (0, 1), on average over calibration sets: k is floor((n + 1) rate).
        confidence: share of calibration sets that shall have it each; None: on average.
    """
    if confidence is None:
        return math.floor((num_scores + 1) * exact(rate)) or None
    low, high = 0, num_scores  # the share falls with k
    while low < high:
        middle = (low + high + 1) // 2
        has_it = float(special.betainc(middle, num_scores + 1 - middle, rate)) >= confidence
        low, high = (middle, high) if has_it else (low, middle - 1)
    return low or None


def least_for_coverage(coverage: float, confidence: float | None = None) -> int:
    """How many scores a threshold of this coverage takes at least."""
    return _least(1 - exact(coverage), confidence)


def least_for_rate(rate: float, confidence: float | None = None) -> int:
    """How many scores a threshold of this false-alarm rate takes at least."""
    return _least(exact(rate), confidence)


def _least(missed: Fraction, confidence: float | None) -> int:
    """The least n of which the largest score, or the smallest, leaves out this share of new ones."""
    if confidence is None:
        return math.ceil(1 / missed) - 1
    least = max(1, math.floor(math.log1p(-confidence) / math.log1p(-float(missed))))
    while -math.expm1(least * math.log1p(-float(missed))) < confidence:  # at most a step: the logarithms are rounded
        least += 1
    return least


def exact(level: float) -> Fraction:
    """The number that was typed: 0.1 is a tenth, so that (n + 1) 0.1 is never a rank too many."""
    return Fraction(repr(float(level)))
