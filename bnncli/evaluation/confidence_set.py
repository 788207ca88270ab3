"""Model confidence set: the scores that may be the best, excluding a best one with probability at most alpha.

The guarantee is that of Hansen, Lunde and Nason (2011, Econometrica 79): posteriors whose true scores are the best, one
or several equal ones, are excluded with probability at most alpha, whichever they are. Excluding i rejects that no j is
better than i. The statistic of i is its largest studentised shortfall over all j. The hypotheses are tested jointly,
from the largest statistic down (Romano and Wolf 2005, Econometrica 73): each step compares the remaining posteriors
with the largest shortfall that chance produces among posteriors none of which is worse than any other. Choosing the
best posterior as the reference therefore gains nothing.

The level alpha is asymptotic. If losses are rare and large, a small sample lacks them and resampling cannot replace
them: at alpha 0.05 one of two equally good networks, one sure and one hedging, is excluded in 15% of samples of 100
examples, 8% of 300 to 1,000 and 4% of 3,000 (tests/evaluation/test_confidence_set.py).

The null distribution: for one checkpoint, the bootstrap replicates of all differences together; for several, Student's
t of each pair, which needs no equal variances, summed by Bonferroni. In simulations of independent posteriors the exact
quantile is at most 4% lower, with two to ten checkpoints and up to eight posteriors.

A posterior far behind cannot be ahead by chance. As in Romano, Shaikh and Wolf (2014, Econometrica 82), a tenth of
alpha pays for simultaneous lower bounds on how far each posterior is behind each other one, which chance has to
overcome first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.paired import SLACK, Sample
from bnncli.lazy import special

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
