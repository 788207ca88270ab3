"""Paired differences between the scores of two posteriors, over the same examples or over the same checkpoints.

One checkpoint: both scores are resampled with the same examples. The deviations of the difference's replicates from the
difference estimate its deviation from the truth (Hall and Wilson 1991, Biometrics 47), symmetrically (Hall 1988, On
symmetric bootstrap confidence intervals). Of the usual intervals this one keeps its level for accuracies, which are
discrete, and for calibration errors, which resampling biases (tests/evaluation/test_paired.py). Predictions from draws
also deviate from the exact integral by an error that all examples share and resampling does not show; it is added to
the replicates. Several checkpoints: Student's paired t test, whose spread contains all of these. Several comparisons:
Holm (1979), A simple sequentially rejective multiple test procedure. Comparisons with the best: see confidence_set.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

# Reordered sums differ by the rounding of float32 weights, which must not break ties.
SLACK = 1e-6


@dataclass(frozen=True)
class Integration:
    """The error of a score due to its finite number of draws.

    Args:
        error: standard error; zero if the integral is exact.
        noise: (R,), draws of the error, with heavier tails than a normal if few groups of draws estimated it.
    """

    error: float
    noise: NDArray[np.float64]


def integration(error: float, degrees: float, *, size: int, seed: int) -> Integration:
    """Return an integration error with `size` draws from Student's t with `degrees` of freedom, scaled by the error."""
    noise = error * np.random.default_rng(seed).standard_t(degrees, size) if error > 0 else np.zeros(size)
    return Integration(error, noise)


@dataclass(frozen=True)
class Sample:
    """A score of one posterior.

    Args:
        values: (n,), one per checkpoint.
        replicates: (R,), resampled over examples, for one checkpoint; else None.
        integration: for one checkpoint; None if unknown, not applicable, or for several checkpoints.
    """

    values: NDArray[np.float64]
    replicates: NDArray[np.float64] | None = None
    integration: Integration | None = None

    @property
    def mean(self) -> float:
        """The mean score over checkpoints."""
        return float(np.mean(self.values))

    @property
    def sampling_error(self) -> float | None:
        """Standard error due to checkpoints or examples; None if unknown."""
        if len(self.values) > 1:
            return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))
        known = np.zeros(0) if self.replicates is None else self.replicates[np.isfinite(self.replicates)]
        return float(np.std(known, ddof=1)) if len(known) > 1 else None

    @property
    def integration_error(self) -> float | None:
        """Standard error due to the finite number of draws; None if unknown."""
        return None if self.integration is None else self.integration.error

    @property
    def integration_variance(self) -> float:
        """Square of the integration error; 0 if unknown."""
        return (self.integration_error or 0.0) ** 2

    @property
    def standard_error(self) -> float | None:
        """Standard error over checkpoints; for one checkpoint, over examples and draws. None if unknown."""
        sampling = self.sampling_error
        return None if sampling is None else math.sqrt(sampling**2 + self.integration_variance)

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return the interval of the score: Student's t over checkpoints, else from deviations of replicates and draws."""
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
        """Return draws of the score's deviation from the truth, (R,): resampling plus integration error."""
        assert self.replicates is not None
        sampling = self.replicates - self.mean
        return sampling if self.integration is None else sampling + self.integration.noise


def correlation(one: Sample, other: Sample) -> float | None:
    """Return the correlation of two scores of the same examples, where integration errors are independent; None if unknown."""
    errors = one.standard_error, other.standard_error
    if one.replicates is None or other.replicates is None or not errors[0] or not errors[1]:
        return None
    known = np.isfinite(one.replicates) & np.isfinite(other.replicates)
    if known.sum() < 2:
        return None
    return float(np.cov(one.replicates[known], other.replicates[known])[0, 1] / (errors[0] * errors[1]))


@dataclass(frozen=True)
class Difference:
    """One score minus another; all but the value are None if the uncertainty is unknown."""

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def difference(one: Sample, other: Sample, *, level: float = 0.95) -> Difference:
    """Return the difference of two scores with its interval and the two-sided p-value of no difference.

    Constant replicates have no variance, so a non-zero difference then has neither interval nor p-value.

    Args:
        one, other: scores of the same checkpoints, with replicates of the same resampled examples.
        level: level of the interval.
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
    """Return the two-sided p-value of a true difference of zero from a difference d and its replicates (R,).

    The share of replicates d* with |d* - d| >= |d|, counting d itself, so at least 1 / (R + 1). Up to that count, it is
    below alpha exactly if the interval of level 1 - alpha excludes zero.
    """
    strayed = np.abs(replicates - value)
    return (1 + int(np.count_nonzero(strayed >= abs(value) * (1 - SLACK)))) / (len(replicates) + 1)


def t_difference(differences: NDArray, *, level: float = 0.95) -> Difference:
    """Return the mean of differences (n,), n >= 2, with interval and p-value of Student's t with n - 1 degrees of freedom.

    If all differences are zero, the p-value is 1; if they are otherwise constant, there is none for lack of variance.
    """
    size, value = len(differences), float(np.mean(differences))
    if np.ptp(differences) == 0:
        return Difference(value, 0.0, value, value, 1.0) if value == 0 else Difference(value)
    error = float(np.std(differences, ddof=1) / math.sqrt(size))
    reach = float(special.stdtrit(size - 1, (1 + level) / 2)) * error
    p_value = 2 * float(special.stdtr(size - 1, -abs(value) / error))
    return Difference(value, error, value - reach, value + reach, p_value)


def skewed_interval(mean: float, error: float, skewness: float, size: int, reach: float) -> tuple[float, float]:
    """Return the interval of a mean of `size` numbers by Hall's correction of Student's t (1992, JRSS B 54, eq. 2.6).

    With S = (mean - m) / sd and skewness g, Hall's T is sqrt(N) (((1 + g S / 3)^3 - 1) / g + g / (6 N)). It is solved
    for m at -+ reach. A g too small for the cube is replaced by 0.

    Args:
        error: standard error of the mean, sd / sqrt(N).
        skewness: g, of the numbers.
        reach: quantile of Student's t, in standard errors.
    """

    def solved(ratio: float) -> float:
        shifted = ratio / math.sqrt(size) - skewness / (6 * size)
        s = shifted if abs(skewness) < 1e-6 else 3 / skewness * float(np.cbrt(1 + skewness * shifted) - 1)
        return mean - s * math.sqrt(size) * error

    return solved(reach), solved(-reach)


def skewness_of(values: NDArray) -> float:
    """Return the skewness of numbers (N,) that are not all equal."""
    scaled = values / np.abs(values).max()  # cubes of small numbers would underflow
    centred = scaled - scaled.mean()
    return float((centred**3).mean() / (centred**2).mean() ** 1.5)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's step-down procedure; None entries are not counted and stay None."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted
