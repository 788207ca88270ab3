"""Differences between the scores of two posteriors, in pairs: over the same examples, or over the same checkpoints.

One checkpoint: both scores are resampled with the same examples, and how far their difference strays from the true one is
told by how far its replicates stray from it (Hall and Wilson 1991, Biometrics 47), to both sides alike (Hall 1988, On
symmetric bootstrap confidence intervals): of the usual definitions the one that keeps its level for accuracies, which are
discrete, and for calibration errors, which resampling biases (tests/evaluation/test_paired.py). Predictions from draws stray from the
exact integral as well, by an error that all examples share and resampling does not show: it is added to the replicates.
Several checkpoints: Student's paired t test over them, whose spread contains all of that. Many comparisons in one column:
Holm (1979), A simple sequentially rejective multiple test procedure; comparisons with the best: best.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

# Sums in another order differ by the rounding of float32 weights, which must not tell a tie from a difference.
SLACK = 1e-6


@dataclass(frozen=True)
class Integration:
    """The error that a finite number of draws leaves in a score.

    Args:
        error: its standard error; zero where the integral is not estimated.
        noise: (R,), draws of it, wider than normal where the error itself was told by few groups of draws.
    """

    error: float
    noise: NDArray[np.float64]


def integration(error: float, degrees: float, *, size: int, seed: int) -> Integration:
    """The integration error of a score, with `size` draws of Student's t, `degrees` of freedom, times the error."""
    noise = error * np.random.default_rng(seed).standard_t(degrees, size) if error > 0 else np.zeros(size)
    return Integration(error, noise)


@dataclass(frozen=True)
class Sample:
    """A score of one posterior.

    Args:
        values: (n,), one for each checkpoint.
        replicates: (R,), resampled over examples, where there is one checkpoint; None without.
        integration: for one checkpoint; None where there is none, where it is not known, and for several checkpoints.
    """

    values: NDArray[np.float64]
    replicates: NDArray[np.float64] | None = None
    integration: Integration | None = None

    @property
    def mean(self) -> float:
        """The score, averaged over checkpoints."""
        return float(np.mean(self.values))

    @property
    def sampling_error(self) -> float | None:
        """The part of the standard error that checkpoints or examples make."""
        if len(self.values) > 1:
            return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))
        known = np.zeros(0) if self.replicates is None else self.replicates[np.isfinite(self.replicates)]
        return float(np.std(known, ddof=1)) if len(known) > 1 else None

    @property
    def integration_error(self) -> float | None:
        """The part of the standard error that a finite number of draws makes; None where it is not told."""
        return None if self.integration is None else self.integration.error

    @property
    def integration_variance(self) -> float:
        """The square of the integration error, 0 where it is not told."""
        return (self.integration_error or 0.0) ** 2

    @property
    def standard_error(self) -> float | None:
        """Of the mean over checkpoints; of the score over examples and draws where there is one; None where untold."""
        sampling = self.sampling_error
        return None if sampling is None else math.sqrt(sampling**2 + self.integration_variance)

    def interval(self, level: float) -> tuple[float, float] | None:
        """The interval around the score alone: Student's over checkpoints, else as far as replicates and draws stray."""
        if len(self.values) > 1:
            found = t_difference(self.values, level=level)
            return None if found.low is None or found.high is None else (found.low, found.high)
        known = np.zeros(0) if self.replicates is None else self.strayed()
        known = known[np.isfinite(known)]
        if len(known) < 2:
            return None
        reach = float(np.quantile(np.abs(known), level))
        return self.mean - reach, self.mean + reach

    def strayed(self) -> NDArray[np.float64]:
        """How far the score strays from the true one, (R,): its replicates from it, and the integration error."""
        assert self.replicates is not None
        sampling = self.replicates - self.mean
        return sampling if self.integration is None else sampling + self.integration.noise


def correlation(one: Sample, other: Sample) -> float | None:
    """Of two scores of the same examples: of their replicates, less what draws add to either; None where that is not told."""
    errors = one.standard_error, other.standard_error
    if one.replicates is None or other.replicates is None or not errors[0] or not errors[1]:
        return None
    known = np.isfinite(one.replicates) & np.isfinite(other.replicates)
    if known.sum() < 2:
        return None
    return float(np.cov(one.replicates[known], other.replicates[known])[0, 1] / (errors[0] * errors[1]))


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

    Replicates that are all equal tell no variance, and so nothing of a difference that is not zero.

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
    sampling = one.replicates - other.replicates
    strayed = one.strayed() - other.strayed()
    sampling, strayed = sampling[np.isfinite(sampling)], strayed[np.isfinite(strayed)]
    if len(strayed) < 2 or (value != 0 and np.ptp(strayed) == 0):
        return Difference(value)
    reach = float(np.quantile(np.abs(strayed), level))
    error = math.sqrt(np.var(sampling, ddof=1) + one.integration_variance + other.integration_variance)
    return Difference(value, error, value - reach, value + reach, bootstrap_p_value(value, value + strayed))


def bootstrap_p_value(value: float, replicates: NDArray) -> float:
    """Two-sided p-value of a true difference of zero, for a difference and its replicates (R,).

    The share of replicates d* with |d* - d| >= |d|, the difference d itself counted as one more, so that it is at least
    1 / (R + 1): how rarely a difference strays from the true one as far as this one would have had to from zero. Below
    alpha where the interval of level 1 - alpha leaves zero out, up to that count.
    """
    strayed = np.abs(replicates - value)
    return (1 + int(np.count_nonzero(strayed >= abs(value) * (1 - SLACK)))) / (len(replicates) + 1)


def t_difference(differences: NDArray, *, level: float = 0.95) -> Difference:
    """The mean of differences (n,), n at least 2, with the interval and p-value of Student's t with n - 1 degrees.

    Differences that are all zero have p-value 1; others that are all equal have none, since they tell no variance.
    """
    size, value = len(differences), float(np.mean(differences))
    if np.ptp(differences) == 0:
        return Difference(value, 0.0, value, value, 1.0) if value == 0 else Difference(value)
    error = float(np.std(differences, ddof=1) / math.sqrt(size))
    reach = float(special.stdtrit(size - 1, (1 + level) / 2)) * error
    p_value = 2 * float(special.stdtr(size - 1, -abs(value) / error))
    return Difference(value, error, value - reach, value + reach, p_value)


def skewed_interval(mean: float, error: float, skewness: float, size: int, reach: float) -> tuple[float, float]:
    """The interval of a mean of `size` numbers that Hall's correction of Student's t gives (1992, JRSS B 54, eq. 2.6).

    With S = (mean - m) / sd, Hall's T is ((1 + g S / 3)^3 - 1) / g + g / (6 N), times sqrt(N), which is solved for m at -+ reach; g,
    the skewness, is taken for 0 where it is so small that the cube says nothing.

    Args:
        error: standard error of the mean, sd / sqrt(N).
        skewness: g, of the numbers.
        reach: of Student's t, in standard errors.
    """

    def solved(ratio: float) -> float:
        shifted = ratio / math.sqrt(size) - skewness / (6 * size)
        s = shifted if abs(skewness) < 1e-6 else 3 / skewness * float(np.cbrt(1 + skewness * shifted) - 1)
        return mean - s * math.sqrt(size) * error

    return solved(reach), solved(-reach)


def skewness_of(values: NDArray) -> float:
    """Of numbers (N,) that are not all equal."""
    scaled = values / np.abs(values).max()  # cubes of what is small would underflow
    centred = scaled - scaled.mean()
    return float((centred**3).mean() / (centred**2).mean() ** 1.5)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for being tested together, by Holm's step-down; those that are None count as none and stay so."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted
