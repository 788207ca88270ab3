"""Differences between the scores of two posteriors, in pairs: over the same examples, or over the same checkpoints.

One checkpoint: both scores are resampled with the same examples, and how far their difference strays from the true one is
told by how far its replicates stray from it (Hall and Wilson 1991, Biometrics 47), to both sides alike (Hall 1988, On
symmetric bootstrap confidence intervals): of the usual definitions the one that keeps its level for accuracies, which are
discrete, and for calibration errors, which resampling biases (tests/test_paired.py). Several checkpoints: Student's paired t test over them. Many comparisons in one
column: Holm (1979), A simple sequentially rejective multiple test procedure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Sample:
    """A score of one posterior.

    Args:
        values: (n,), one for each checkpoint.
        replicates: (R,), resampled over examples, where there is one checkpoint; None without.
    """

    values: NDArray[np.float64]
    replicates: NDArray[np.float64] | None = None

    @property
    def mean(self) -> float:
        """The score, averaged over checkpoints."""
        return float(np.mean(self.values))

    @property
    def standard_error(self) -> float | None:
        """Of the mean over checkpoints; of the score over examples where there is one checkpoint; None where untold."""
        if len(self.values) > 1:
            return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))
        known = np.zeros(0) if self.replicates is None else self.replicates[np.isfinite(self.replicates)]
        return float(np.std(known, ddof=1)) if len(known) > 1 else None


@dataclass(frozen=True)
class Difference:
    """One score minus another. All but the value are None where it cannot be told how far it strays."""

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def difference(one: Sample, other: Sample, *, level: float = 0.95) -> Difference:
    """The difference of two scores, with its interval and the two-sided p-value of no difference.

    Args:
        one, other: scores of the same checkpoints; replicates of the same resampled examples.
        level: of the interval.
    """
    if len(one.values) != len(other.values):
        raise ValueError(f"expected scores of the same checkpoints, got {len(one.values)} and {len(other.values)}")
    if len(one.values) > 1:
        return t_difference(one.values - other.values, level=level)
    value = one.mean - other.mean
    if one.replicates is None or other.replicates is None:
        return Difference(value)
    replicates = one.replicates - other.replicates
    replicates = replicates[np.isfinite(replicates)]
    if len(replicates) < 2:
        return Difference(value)
    reach = float(np.quantile(np.abs(replicates - value), level))
    error = float(np.std(replicates, ddof=1))
    return Difference(value, error, value - reach, value + reach, bootstrap_p_value(value, replicates))


def bootstrap_p_value(value: float, replicates: NDArray) -> float:
    """Two-sided p-value of a true difference of zero, for a difference and its replicates (R,).

    The share of replicates d* with |d* - d| >= |d|, the difference d itself counted as one more, so that it is at least
    1 / (R + 1): how rarely a difference strays from the true one as far as this one would have had to from zero. Below
    alpha where the interval of level 1 - alpha leaves zero out, up to that count.
    """
    strayed = np.abs(replicates - value)
    # Sums in another order differ by the rounding of float32 weights, which must not tell a tie from a difference.
    slack = 1e-6 * abs(value)
    return (1 + int(np.count_nonzero(strayed >= abs(value) - slack))) / (len(replicates) + 1)


def t_difference(differences: NDArray, *, level: float = 0.95) -> Difference:
    """The mean of differences (n,), n at least 2, with the interval and p-value of Student's t with n - 1 degrees.

    Differences that are all zero have p-value 1; others that are all equal have none, since they tell no variance.
    """
    size, value = len(differences), float(np.mean(differences))
    if np.ptp(differences) == 0:
        return Difference(value, 0.0, value, value, 1.0) if value == 0 else Difference(value)
    error = float(np.std(differences, ddof=1) / math.sqrt(size))
    reach = float(stats.t.ppf((1 + level) / 2, size - 1)) * error
    p_value = 2 * float(stats.t.sf(abs(value) / error, size - 1))
    return Difference(value, error, value - reach, value + reach, p_value)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for being tested together, by Holm's step-down; those that are None count as none and stay so."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True)
class Standing:
    """How one posterior stands in a column of scores.

    Args:
        against: its score minus that of the best, or of the baseline; None for that one itself, or where undefined.
        p_adjusted: by Holm, over the comparisons in the column.
        is_best: it is the best; is_close: or not significantly worse than the best.
    """

    against: Difference | None = None
    p_adjusted: float | None = None
    is_best: bool = False
    is_close: bool = False


def standings(
    samples: Sequence[Sample | None], *, higher_is_better: bool | None, alpha: float, baseline: int | None = None
) -> list[Standing]:
    """How each of the scores of a column stands against the best, or against the one at `baseline`.

    Args:
        samples: None where undefined. Of equal best ones the first is the best.
        higher_is_better: None where neither is, and no one best.
        alpha: level of the test of all of them together, and of each interval (1 - alpha).
    """
    known = [place for place, sample in enumerate(samples) if sample is not None]
    sign = 1 if higher_is_better else -1
    best = max(known, key=lambda place: (sign * _of(samples, place).mean, -place), default=None)
    best = None if higher_is_better is None else best
    reference = best if baseline is None else baseline
    if reference is None or reference not in known:
        return [Standing(is_best=place == best, is_close=place == best) for place in range(len(samples))]
    others = [place for place in known if place != reference]
    found = {place: difference(_of(samples, place), _of(samples, reference), level=1 - alpha) for place in others}
    adjusted = dict(zip(others, holm([found[place].p_value for place in others]), strict=True))
    standing = []
    for place in range(len(samples)):
        p = adjusted.get(place)
        is_close = place == best or (baseline is None and p is not None and p > alpha)
        standing.append(Standing(found.get(place), p, place == best, is_close))
    return standing


def _of(samples: Sequence[Sample | None], place: int) -> Sample:
    sample = samples[place]
    assert sample is not None
    return sample
