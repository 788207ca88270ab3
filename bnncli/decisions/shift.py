"""Shift alarm: the two-sample Kolmogorov-Smirnov test between the scores of a batch and the calibration scores.

The p-value is exact for any two sample sizes: a sum over lattice paths (Hodges 1958), computed as the probability that
a random walk conditioned on its end point stays within a band. Ties decrease the statistic, so the level holds with
them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

SMALLEST_P = 1e-9  # smaller p-values, computed as 1 - sum, would be rounding errors
_BAND = 1 << 28  # limit on the number of states (seconds of work); beyond it the bound in distance_p_value decides


@dataclass(frozen=True)
class ShiftRule:
    """A shift alarm.

    Args:
        scores: (n,), calibration scores in ascending order.
        level: largest probability of an alarm without shift, over calibration sets and batches.
    """

    scores: NDArray[np.float64]
    level: float

    def p_value(self, batch: NDArray) -> float | None:
        """Return the p-value of a batch's scores (m,); None if the batch is empty."""
        if len(batch) == 0:
            return None
        return distance_p_value(largest_gap(self.scores, batch), len(self.scores), len(batch))


def largest_gap(first: NDArray, second: NDArray) -> int:
    """Return the Kolmogorov-Smirnov distance of samples (n,) and (m,) times n m, an integer."""
    one, other = (np.sort(np.asarray(side, dtype=np.float64)) for side in (first, second))
    places = np.concatenate([one, other])
    below, others = (np.searchsorted(side, places, side="right").astype(np.int64) for side in (one, other))
    return int(np.abs(below * len(other) - others * len(one)).max())


def distance_p_value(gap: int, n: int, m: int) -> float:
    """Return the probability that samples of sizes n and m from one continuous distribution are at least this far apart.

    `gap` is the distance in units of 1 / (n m). The result is at least SMALLEST_P.
    """
    if gap == 0:
        return 1.0
    n, m = min(n, m), max(n, m)
    squared = (gap / (n * m)) ** 2 * n * m / (n + m)
    # Wei and Dudley (2012, arXiv:1107.5356) prove this bound for equal sizes; it holds for all unequal sizes ever
    # computed. It decides only if the exact value is far below SMALLEST_P or would take too long.
    bound = math.e * math.exp(-2 * squared)
    if bound < SMALLEST_P * 1e-3 or n * (2 * gap // n + 1) > _BAND:
        return max(SMALLEST_P, min(1.0, bound))
    return max(SMALLEST_P, min(1.0, 1 - _stays_within(gap, n, m)))


def _stays_within(gap: int, n: int, m: int) -> float:
    """Return the probability that a uniform lattice path of n and m steps keeps |i m - j n| < gap after i and j steps."""
    from scipy.signal import lfilter

    chance = n / (n + m)  # probability of a step of the n; any value is correct, this one keeps the numbers near one
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
