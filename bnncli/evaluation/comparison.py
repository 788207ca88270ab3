"""Compare scores in pairs over examples or checkpoints: differences, standings, the set that may be best, agreement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

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


def sample_skewness(values: NDArray) -> float:
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


@dataclass(frozen=True)
class Standing:
    """The standing of one posterior in a column of scores.

    Args:
        against: its score minus that of the best or of the baseline; None for that one itself, or if undefined. The
            interval is pointwise against a baseline, and simultaneous over all pairs against the best. The latter has
            no p-value, because the pair was chosen for its difference.
        p_adjusted: against a baseline, Holm-adjusted p-value of no difference; else p-value of being among the best.
        is_best: it is the best.
        is_close: it is not significantly worse than any other.
    """

    against: Difference | None = None
    p_adjusted: float | None = None
    is_best: bool = False
    is_close: bool = False


def standings(
    samples: Sequence[Sample | None], *, higher_is_better: bool | None, alpha: float, baseline: int | None = None
) -> list[Standing]:
    """Return the standing of each score of a column against the best, or against the one at `baseline`.

    Args:
        samples: None if undefined. The first of tied best ones is the best.
        higher_is_better: None if no direction is better, and none is the best.
        alpha: level of the joint test; 1 - alpha is the level of each interval against a baseline, and the simultaneous
            level of the intervals against the best.
    """
    known = {place: sample for place, sample in enumerate(samples) if sample is not None}
    sign = 1 if higher_is_better else -1
    best = max(known, key=lambda place: (sign * known[place].mean, -place), default=None)
    best = None if higher_is_better is None else best
    if baseline is not None:
        return _against_baseline(samples, baseline, best, alpha)
    if best is None or higher_is_better is None:
        return [Standing() for _ in samples]
    found = confidence_set(samples, higher_is_better=higher_is_better, alpha=alpha)
    standing = []
    for place in range(len(samples)):
        if place not in known:
            standing.append(Standing())
            continue
        p = found.p_values[place]
        against = None if place == best else _from_best(known[place], known[best], float(found.reach[place, best]))
        standing.append(Standing(against, p, place == best, p is None or p > alpha))
    return standing


def fewest_replicates(num_others: int, *, alpha: float, has_baseline: bool) -> int:
    """Return the number of replicates at which the p-value of one of several comparisons can be alpha."""
    # Without a baseline the remaining ones are tested together; the confidence set omits its bounds if replicates are
    # few.
    return int((num_others if has_baseline else 1) / alpha) + 1


def _against_baseline(
    samples: Sequence[Sample | None], baseline: int, best: int | None, alpha: float
) -> list[Standing]:
    """Return differences from the baseline, tested with Holm."""
    reference = samples[baseline]
    if reference is None:
        return [Standing(is_best=place == best, is_close=place == best) for place in range(len(samples))]
    found = {
        place: difference(sample, reference, level=1 - alpha)
        for place, sample in enumerate(samples)
        if sample is not None and place != baseline
    }
    adjusted = dict(zip(found, holm([one.p_value for one in found.values()]), strict=True))
    return [
        Standing(found.get(place), adjusted.get(place), place == best, place == best) for place in range(len(samples))
    ]


def _from_best(own: Sample, best: Sample, reach: float) -> Difference:
    """Return the difference from the best, with the simultaneous interval."""
    found = difference(own, best)
    low, high = (found.value - reach, found.value + reach) if np.isfinite(reach) else (None, None)
    return replace(found, low=low, high=high, p_value=None)


_SHARE_OF_BOUNDS = 0.1  # share of alpha spent on the bounds, as in Romano, Shaikh and Wolf
_MOST_STATISTIC = 1e4  # cap on a statistic that a bound is computed from
Floats = NDArray[np.float64]


class ConfidenceSet(NamedTuple):
    """The result of the search for the best posterior.

    p_values: (k,), multiplicity-adjusted p-values of being among the best; None if undetermined.
    reach: (k, k), simultaneous margin of error of all differences at level 1 - alpha; NaN if undetermined.
    """

    p_values: list[float | None]
    reach: Floats


class _Chance(NamedTuple):
    """The null distribution of the shortfalls.

    behind: (k, k), by how many standard errors row i is worse than column j; antisymmetric.
    exceeds: maps some rows and a statistic to the probability, including the cost of the bounds, that any row's largest
    shortfall reaches it if no row is worse than any other posterior.
    reach: as in ConfidenceSet.
    """

    behind: Floats
    exceeds: Callable[[NDArray[np.intp], float], float]
    reach: Floats


def confidence_set(samples: Sequence[Sample | None], *, higher_is_better: bool, alpha: float) -> ConfidenceSet:
    """Return p-values of being among the best and the simultaneous margins of all differences.

    A posterior is excluded if its p-value is at most alpha; the best in the sample never is.

    Args:
        samples: scores of the same checkpoints, with replicates of the same resampled examples; None if undefined.
        alpha: the level, which also limits the cost of the bounds.
    """
    size = len(samples)
    found = ConfidenceSet([None] * size, np.full((size, size), np.nan))
    places = _usable(samples)
    if len(places) < 2:
        return found
    own = [sample for place, sample in enumerate(samples) if place in places and sample is not None]
    # With two posteriors there is only one rival, so bounds would save nothing.
    share = _SHARE_OF_BOUNDS if len(own) > 2 else 0.0
    chance = (_over_checkpoints if len(own[0].values) > 1 else _over_examples)(
        own, sign=-1.0 if higher_is_better else 1.0, alpha=alpha, spent=share * alpha
    )
    for place, p in zip(places, _step_down(chance), strict=True):
        found.p_values[place] = p
    found.reach[np.ix_(places, places)] = chance.reach
    return found


def _usable(samples: Sequence[Sample | None]) -> list[int]:
    """Return the indices of samples whose differences can be tested."""
    known = [(place, sample) for place, sample in enumerate(samples) if sample is not None]
    if known and len(known[0][1].values) > 1:
        return [place for place, _ in known]
    return [
        place
        for place, sample in known
        if sample.replicates is not None and 2 * np.isfinite(sample.replicates).sum() > max(len(sample.replicates), 2)
    ]


def _step_down(chance: _Chance) -> list[float]:
    """Return adjusted p-values (k,) of being among the best, tested from the largest shortfall down."""
    shortfall = chance.behind.max(axis=1)
    order = np.argsort(-shortfall, kind="stable")
    p_values, largest = np.ones(len(order)), 0.0
    for rank, place in enumerate(order):
        if shortfall[place] <= 0:  # the best posterior and its equals
            break
        largest = max(largest, min(1.0, chance.exceeds(order[rank:], float(shortfall[place]))))
        p_values[place] = largest
    return p_values.tolist()


def _over_examples(samples: Sequence[Sample], *, sign: float, alpha: float, spent: float) -> _Chance:
    """Return the null distribution from one checkpoint's replicates: two-sided deviations of all pairs together."""
    size, values = len(samples), np.array([sample.mean for sample in samples])
    drawn = np.stack([_replicates(sample) for sample in samples], axis=1)  # (R, k)
    is_known = np.isfinite(drawn).all(axis=1)
    if is_known.sum() < 2:
        return _Chance(np.zeros((size, size)), lambda rows, statistic: 1.0, np.full((size, size), np.nan))
    variances = [np.var(drawn[is_known] - drawn[is_known][:, [row]], axis=0, ddof=1) for row in range(size)]
    integration = np.array([sample.integration_variance for sample in samples])
    errors = np.sqrt(np.stack(variances) + (integration[:, None] + integration) * (1 - np.eye(size)))
    behind = _over(sign * (values[:, None] - values), errors)
    centred = (np.stack([sample.strayed() for sample in samples], axis=1))[is_known]

    def strayed(row: int) -> Floats:
        """Return the deviations (R, k) of one posterior's differences to all others, in standard errors."""
        return _over(np.abs(centred[:, [row]] - centred), errors[row])

    largest = np.max([strayed(row).max(axis=1) for row in range(size)], axis=0)
    is_bounded = spent * (len(centred) + 1) >= 1
    bounds = np.maximum(0.0, behind.T - np.quantile(largest, 1 - spent)) if is_bounded else np.zeros_like(behind)
    reached = np.stack([(strayed(row) - bounds[row]).max(axis=1) for row in range(size)], axis=1)  # (R, k)

    def exceeds(rows: NDArray[np.intp], statistic: float) -> float:
        count = int(np.count_nonzero(reached[:, rows].max(axis=1) >= statistic * (1 - SLACK)))
        return (1 + count) / (len(reached) + 1) + (spent if is_bounded else 0.0)

    return _Chance(behind, exceeds, float(np.quantile(largest, 1 - alpha)) * errors)


def _over_checkpoints(samples: Sequence[Sample], *, sign: float, alpha: float, spent: float) -> _Chance:
    """Return the null distribution from Student's t of each pair's differences over checkpoints, summed over pairs."""
    values = sign * np.stack([sample.values for sample in samples])  # (k, n)
    differences = values[:, None] - values
    size, degrees = len(samples), values.shape[1] - 1
    errors = differences.std(axis=2, ddof=1) / np.sqrt(degrees + 1)
    # Constant differences have no variance to test against.
    errors[np.ptp(differences, axis=2) == 0] = np.inf
    behind = differences.mean(axis=2) / errors
    num_pairs = size * (size - 1)
    bounds = _least_lead(behind.T, degrees, chance=spent / num_pairs) if spent else np.zeros_like(behind)

    def exceeds(rows: NDArray[np.intp], statistic: float) -> float:
        # P(t > statistic) at noncentralities -bound, by symmetry, so that small tails keep their precision. It is at
        # most the probability that the normal numerator of t is positive, which replaces NaN if the series fails.
        tails = np.fmin(special.nctdtr(degrees, bounds[rows], -statistic), special.ndtr(-bounds[rows]))
        tails[np.arange(len(rows)), rows] = 0.0  # a posterior against itself
        return float(tails.sum()) + spent

    reach = -float(special.stdtrit(degrees, alpha / num_pairs)) * np.where(np.isfinite(errors), errors, np.nan)
    return _Chance(behind, exceeds, reach)


def _least_lead(statistics: Floats, degrees: int, *, chance: float) -> Floats:
    """Return lower bounds (k, k) on the true differences in units of the true standard error; 0 if 0 is plausible.

    The bound is the noncentrality at which Student's t reaches the statistic with probability `chance`.
    """
    found = np.zeros_like(statistics)
    is_ahead = statistics > 0
    reached = np.minimum(statistics[is_ahead], _MOST_STATISTIC)
    bounds = special.nctdtrinc(degrees, 1 - chance, reached)
    found[is_ahead] = np.where(np.isfinite(bounds), np.maximum(bounds, 0.0), 0.0)  # no bound is equivalent to 0
    return found


def _replicates(sample: Sample) -> Floats:
    assert sample.replicates is not None  # ensured by _usable
    return sample.replicates


def _over(values: Floats, errors: Floats) -> Floats:
    """Divide values by their standard errors; 0 where the error, and so the difference, is 0."""
    return np.divide(values, errors, out=np.zeros(np.broadcast(values, errors).shape), where=errors > 0)


LEVEL = 0.01  # probability of calling two estimates of the same number different, or ordered


@dataclass(frozen=True)
class Estimate:
    """A measured number.

    Args:
        value: finite.
        standard_error: in the unit of the value, at least 0 (0: all values were equal); None if unknown, which is
            treated as 0.
        count: number of values behind the standard error, such as seeds or checkpoints; 0 if they are so many
            (examples, draws) that the standard error is exact.

    Raises:
        ValueError: the numbers are not finite or contradict each other.
    """

    value: float
    standard_error: float | None = None
    count: int = 0

    def __post_init__(self) -> None:
        error = self.standard_error
        if not math.isfinite(self.value) or (error is not None and not (math.isfinite(error) and error >= 0)):
            raise ValueError(f"expected a finite value and a nonnegative standard error; got {self.value}, {error}")
        if self.count < 0 or (self.count == 1 and error):
            raise ValueError(f"a standard error above 0 needs several values; got {self.count}")

    @classmethod
    def of_repeats(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of repeats, with its standard error if there are several."""
        count, mean = len(values), statistics.fmean(values)
        return cls(mean, statistics.stdev(values) / math.sqrt(count), count) if count > 1 else cls(mean)

    @classmethod
    def of_share(cls, share: float, trials: int) -> Estimate:
        """Return a share of trials with a standard error that is positive even if all trials gave the same result.

        The standard error is the longer side of the exact interval of level 1 - LEVEL (Clopper and Pearson 1934),
        divided by the normal quantile.
        """
        count = round(share * trials)
        low = float(special.betaincinv(count, trials - count + 1, LEVEL / 2)) if count else 0.0
        high = float(special.betaincinv(count + 1, trials - count, 1 - LEVEL / 2)) if count < trials else 1.0
        return cls(share, max(share - low, high - share) / quantile(math.inf))

    @property
    def variance(self) -> float:
        """Squared standard error; 0 if unknown."""
        return (self.standard_error or 0.0) ** 2


class Agreement(NamedTuple):
    """The distance of two estimates, the allowed distance, and the factor k in it."""

    distance: float
    allowed: float
    factor: float

    @property
    def is_within(self) -> bool:
        """Return whether the estimates agree."""
        return self.distance <= self.allowed


def agreement(ours: Estimate, published: Estimate, tolerance: float) -> Agreement:
    """Compare the distance of two estimates with the allowed distance.

    Args:
        tolerance: at least 0, in the unit of the estimates: the difference that has known reasons.
    """
    factor = error_factor(ours, published)
    allowed = tolerance + factor * math.sqrt(ours.variance + published.variance)
    return Agreement(abs(ours.value - published.value), allowed, factor)


def sign(estimate: Estimate, level: float = LEVEL) -> int:
    """Return 1 or -1 if a number is significantly above or below 0, each falsely with probability at most level / 2;

    else 0.
    """
    margin = error_factor(estimate, level=level) * math.sqrt(estimate.variance)
    if abs(estimate.value) <= margin:
        return 0
    return 1 if estimate.value > 0 else -1


def error_factor(*estimates: Estimate, level: float = LEVEL) -> float:
    """Return the factor k of the combined standard error: 2.576 if all are exact, 9.92 for one estimate from three seeds."""
    parts = [(one.variance, quantile(one.count - 1 if one.count else math.inf, level)) for one in estimates]
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return quantile(math.inf, level)
    return sum(variance * factor for variance, factor in parts) / total


@cache
def quantile(degrees: float, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t; 2.576 for infinitely many degrees of freedom."""
    if math.isinf(degrees):
        return float(special.ndtri(1 - level / 2))
    return float(special.stdtrit(degrees, 1 - level / 2))
