"""Which of several scores may be the best: the set that leaves out none of the best, but for a chance alpha.

The promise is that of a model confidence set (Hansen, Lunde and Nason 2011, Econometrica 79): posteriors whose true scores
are the best, one or several equal ones, are left out with probability at most alpha, whichever they are. To leave i out
is to reject that no j is better than i. The statistic of i is its largest studentised shortfall, over all j, and the
hypotheses are tested together, from the largest statistic down (Romano and Wolf 2005, Econometrica 73): at each step those
that are left are held against the largest shortfall that chance makes among posteriors which are no worse than any. So
nothing is won by choosing the best as the one to compare with.

The chance is alpha for many examples. Where losses are rare and large, a sample of few lacks them and resampling cannot make them up: at
alpha 0.05 one of two equally good networks, one sure and one hedging, is left out in 15 % of samples of 100 examples, 8 % of 300 to
1,000 and 4 % of 3,000 (tests/evaluation/test_confidence_set.py).

How far chance goes: one checkpoint: the bootstrap's replicates of all differences together. Several: Student's t of each
pair, which needs no equal variances, added up (Bonferroni): simulated for independent posteriors, the exact quantile is at
most 4 % lower, with two to ten checkpoints and up to eight posteriors.

A posterior far behind cannot have been ahead by chance: as in Romano, Shaikh and Wolf (2014, Econometrica 82), a tenth of
alpha pays for lower bounds, holding together, on how far each lies behind each, and chance has to make that up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.paired import SLACK, Sample
from bnncli.lazy import special

_SHARE_OF_BOUNDS = 0.1  # of alpha, for the bounds; Romano, Shaikh and Wolf's choice
_MOST_STATISTIC = 1e4  # that a bound is made of
Floats = NDArray[np.float64]


class ConfidenceSet(NamedTuple):
    """How posteriors stand in the search for the best.

    p_values: (k,), of each being among the best, adjusted for being tested together; None where it cannot be told.
    reach: (k, k), by how much the difference of two strays from the true one, all pairs together, at level 1 - alpha; NaN
        where it cannot be told.
    """

    p_values: list[float | None]
    reach: Floats


class _Chance(NamedTuple):
    """What chance alone makes of the shortfalls.

    behind: (k, k), how many standard errors row i is worse than column j; antisymmetric.
    exceeds: for some rows and a statistic, the chance that any row's largest shortfall reaches it if none of them is
        worse than any other posterior, together with what the bounds cost.
    reach: as in ConfidenceSet.
    """

    behind: Floats
    exceeds: Callable[[NDArray[np.intp], float], float]
    reach: Floats


def confidence_set(samples: Sequence[Sample | None], *, higher_is_better: bool, alpha: float) -> ConfidenceSet:
    """P-values of being among the best, and how far all differences together may stray.

    A posterior is left out where its p-value is at most alpha; the best of the sample never is.

    Args:
        samples: None where undefined. Scores of the same checkpoints; replicates of the same resampled examples.
        alpha: the level, which also sets what the bounds may cost.
    """
    size = len(samples)
    found = ConfidenceSet([None] * size, np.full((size, size), np.nan))
    places = _usable(samples)
    if len(places) < 2:
        return found
    own = [sample for place, sample in enumerate(samples) if place in places and sample is not None]
    # Two are each other's only rival: there is nothing for bounds to save.
    share = _SHARE_OF_BOUNDS if len(own) > 2 else 0.0
    chance = (_over_checkpoints if len(own[0].values) > 1 else _over_examples)(
        own, sign=-1.0 if higher_is_better else 1.0, alpha=alpha, spent=share * alpha
    )
    for place, p in zip(places, _step_down(chance), strict=True):
        found.p_values[place] = p
    found.reach[np.ix_(places, places)] = chance.reach
    return found


def _usable(samples: Sequence[Sample | None]) -> list[int]:
    """Places of the samples whose differences can be tested."""
    known = [(place, sample) for place, sample in enumerate(samples) if sample is not None]
    if known and len(known[0][1].values) > 1:
        return [place for place, _ in known]
    return [
        place
        for place, sample in known
        if sample.replicates is not None and 2 * np.isfinite(sample.replicates).sum() > max(len(sample.replicates), 2)
    ]


def _step_down(chance: _Chance) -> list[float]:
    """Adjusted p-values (k,) of being among the best: tested from the largest shortfall down."""
    shortfall = chance.behind.max(axis=1)
    order = np.argsort(-shortfall, kind="stable")
    p_values, largest = np.ones(len(order)), 0.0
    for rank, place in enumerate(order):
        if shortfall[place] <= 0:  # ahead of all: the best, and its equals
            break
        largest = max(largest, min(1.0, chance.exceeds(order[rank:], float(shortfall[place]))))
        p_values[place] = largest
    return p_values.tolist()


def _over_examples(samples: Sequence[Sample], *, sign: float, alpha: float, spent: float) -> _Chance:
    """Chance as the replicates of one checkpoint show it: deviations to both sides alike, of all pairs together."""
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
        """(R, k), how far the differences of one posterior from all others stray, in standard errors."""
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
    """Chance by Student's t of each pair's differences over checkpoints, added up over pairs."""
    values = sign * np.stack([sample.values for sample in samples])  # (k, n)
    differences = values[:, None] - values
    size, degrees = len(samples), values.shape[1] - 1
    errors = differences.std(axis=2, ddof=1) / np.sqrt(degrees + 1)
    # Differences that are all equal tell no variance, by which they could be judged.
    errors[np.ptp(differences, axis=2) == 0] = np.inf
    behind = differences.mean(axis=2) / errors
    num_pairs = size * (size - 1)
    bounds = _least_lead(behind.T, degrees, chance=spent / num_pairs) if spent else np.zeros_like(behind)

    def exceeds(rows: NDArray[np.intp], statistic: float) -> float:
        # P(t > statistic) at noncentralities -bound, by symmetry, so that small ones keep their digits. At most the chance
        # that the normal in t's numerator is positive, which stands in for NaN where the series fails.
        tails = np.fmin(special.nctdtr(degrees, bounds[rows], -statistic), special.ndtr(-bounds[rows]))
        tails[np.arange(len(rows)), rows] = 0.0  # a posterior against itself
        return float(tails.sum()) + spent

    reach = -float(special.stdtrit(degrees, alpha / num_pairs)) * np.where(np.isfinite(errors), errors, np.nan)
    return _Chance(behind, exceeds, reach)


def _least_lead(statistics: Floats, degrees: int, *, chance: float) -> Floats:
    """Lower bounds (k, k) on the true differences, in standard errors of known size; 0 where that may be the truth.

    The noncentrality under which Student's t reaches the statistic with just the probability `chance`.
    """
    found = np.zeros_like(statistics)
    is_ahead = statistics > 0
    reached = np.minimum(statistics[is_ahead], _MOST_STATISTIC)
    bounds = special.nctdtrinc(degrees, 1 - chance, reached)
    found[is_ahead] = np.where(np.isfinite(bounds), np.maximum(bounds, 0.0), 0.0)  # no bound is a bound of 0
    return found


def _replicates(sample: Sample) -> Floats:
    assert sample.replicates is not None  # else it is not usable
    return sample.replicates


def _over(values: Floats, errors: Floats) -> Floats:
    """Values in standard errors; 0 where there is no error, and so no difference either."""
    return np.divide(values, errors, out=np.zeros(np.broadcast(values, errors).shape), where=errors > 0)
