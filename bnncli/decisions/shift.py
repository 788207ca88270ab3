"""Whether a batch of examples comes from where the calibration examples do: the two-sample Kolmogorov-Smirnov test of a score.

The p-value is exact for any two sizes: a sum over lattice paths (Hodges 1958), as probabilities of a random walk that ends where both
samples are used up. Ties make the statistic smaller, so that the level holds with them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

SMALLEST_P = 1e-9  # below it a p-value, one less a sum, is rounding
_BAND = 1 << 28  # states of walks that are looked at, seconds; beyond it the bound below decides


@dataclass(frozen=True)
class ShiftRule:
    """The alarm of a batch.

    Args:
        scores: (n,) of the calibration examples, ascending.
        level: probability of an alarm where nothing has shifted, over calibration sets and batches, at most.
    """

    scores: NDArray[np.float64]
    level: float

    def p_value(self, batch: NDArray) -> float | None:
        """Of the scores (m,) of a batch; None of an empty one."""
        if len(batch) == 0:
            return None
        return distance_p_value(largest_gap(self.scores, batch), len(self.scores), len(batch))


def largest_gap(first: NDArray, second: NDArray) -> int:
    """The Kolmogorov-Smirnov distance of two samples (n,) and (m,) times n m: a whole number."""
    one, other = (np.sort(np.asarray(side, dtype=np.float64)) for side in (first, second))
    places = np.concatenate([one, other])
    below, others = (np.searchsorted(side, places, side="right").astype(np.int64) for side in (one, other))
    return int(np.abs(below * len(other) - others * len(one)).max())


def distance_p_value(gap: int, n: int, m: int) -> float:
    """The probability that samples of n and m from one continuous distribution are as far apart, in units of 1 / (n m).

    At least SMALLEST_P.
    """
    if gap == 0:
        return 1.0
    n, m = min(n, m), max(n, m)
    squared = (gap / (n * m)) ** 2 * n * m / (n + m)
    # Wei and Dudley (2012, arXiv:1107.5356): holds of equal sizes, and of all unequal ones that were computed. It decides only where the
    # exact value is surely far below what can be told, or takes too long.
    bound = math.e * math.exp(-2 * squared)
    if bound < SMALLEST_P * 1e-3 or n * (2 * gap // n + 1) > _BAND:
        return max(SMALLEST_P, min(1.0, bound))
    return max(SMALLEST_P, min(1.0, 1 - _stays_within(gap, n, m)))


def _stays_within(gap: int, n: int, m: int) -> float:
    """The probability that a path of n and m steps, all alike, has |i m - j n| < gap throughout; i and j steps have been made."""
    from scipy.signal import lfilter

    chance = n / (n + m)  # of a step of the n: any would do, this keeps the numbers near one
    start = 0
    row: NDArray[np.floating] = np.ones(1)
    for i in range(n + 1):
        first, last = max(0, (i * m - gap) // n + 1), min(m, -((-i * m - gap) // n) - 1)
        if last < first:
            return 0.0
        if i == 0:
            row = (1 - chance) ** np.arange(last + 1)
        else:
            arriving = np.zeros(last - first + 1)
            kept = row[first - start :]
            arriving[: len(kept)] = chance * kept
            row = lfilter([1.0], [1.0, -(1 - chance)], arriving)
        start = first
    log_ending = (
        special.gammaln(n + m + 1) - special.gammaln(n + 1) - special.gammaln(m + 1)
        + n * math.log(chance) + m * math.log1p(-chance)
    )  # fmt: skip
    return float(row[m - start] / math.exp(log_ending))
