"""Calibration errors against chance: the error of a calibrated model, and intervals for the population's error.

Observed and stated frequencies always differ in a sample, so even a calibrated model has a positive error, more so the
fewer the examples. Consistency resampling (Broecker and Smith 2007, Weather and Forecasting 22, 651) draws the labels
of a calibrated model from the predicted probabilities. The mean of its errors is the floor of the value; how often they
reach the value is a test of calibration.

The intervals invert such tests: for every size of the gaps, they test whether a sample would give the observed error,
with noise drawn at frequencies between the stated and the observed ones. Gaps of the same size can be spread over the
bins in many ways. For the lower end, the observed gaps are shrunk towards 0 by a multiple of their noise (few gaps
beside much noise). For the upper end, the larger of two is used: the observed gaps scaled, and gaps proportional to
their noise, which give the smallest values for their size; bins with few events add no noise, up to the value plus its
standard error. An interval of level 1 - alpha contains 0 if and only if the test's p-value is at least alpha / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.weighted_scores import Floats
from bnncli.lazy import special

NUM_DRAWS = 1000  # draws of a calibrated model's labels
_FEWEST_DRAWS = 200
_MOST_VALUES = 1 << 16  # number of draws times number of bins; many bins get fewer draws
FEWEST_EVENTS = 5  # expected events in a bin, below which its noise is unreliable
_STEPS = 14  # bisection steps: the ends are exact to a few thousandths of the width
_DOUBLINGS = 40


@dataclass(frozen=True)
class Gaps:
    """Stated minus observed frequencies of M bins, as sums over the examples of each bin.

    Args:
        observed: (M,).
        calibrated: (R, M), draws of a calibrated model.
        noise: (R, M), draws of the sampling noise in the gaps; mean 0.
        is_rare: (M,), bins of so few events that the noise at other frequencies may be much smaller.
    """

    observed: Floats
    calibrated: Floats
    noise: Floats
    is_rare: NDArray[np.bool_]


@dataclass(frozen=True)
class CalibrationError:
    """A calibration error as a function of gaps.

    Args:
        estimate: maps gaps (R, M) of samples to errors (R,), which debiasing may make negative.
        size: maps gaps (M,) of a population to its error.
        is_inverted: whether the interval inverts tests; False for the largest gap, whose size constrains no other gap.
    """

    estimate: Callable[[Floats], Floats]
    size: Callable[[Floats], float]
    is_inverted: bool = True


def against_chance(gaps: Gaps, form: CalibrationError, *, level: float) -> dict[str, Any]:
    """Return `floor`, `p_calibrated` and `interval` of a calibration error.

    Args:
        level: level of the interval, between 0 and 1.
    """
    estimate = float(form.estimate(gaps.observed[None])[0])
    found = floor_of(gaps, form)
    tail = (1 - level) / 2
    low = 0.0 if found["p_calibrated"] >= tail else _low(gaps, form, estimate, tail)
    high = max(low, _high(gaps, form, estimate, tail))
    ends = {"low": min(low, 1.0), "high": min(high, 1.0), "level": level, "method": "inverted"}
    return {**found, "interval": {**ends, "replicates": len(gaps.calibrated)}}


def floor_of(gaps: Gaps, form: CalibrationError) -> dict[str, float]:
    """Return `floor`, a calibrated model's mean error, and `p_calibrated`, the p-value of the observed error."""
    estimate = float(form.estimate(gaps.observed[None])[0])
    drawn = form.estimate(gaps.calibrated)
    reached = int(np.sum(drawn >= estimate - 1e-12))  # tolerate rounding of reordered sums
    return {"floor": float(np.maximum(drawn, 0.0).mean()), "p_calibrated": (1 + reached) / (1 + len(drawn))}


def drawn_gaps(
    size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, generator: np.random.Generator
) -> Gaps:
    """Return the gaps of bins whose events happen independently.

    Args:
        size: (M,), possible events per bin, at least 1.
        stated, squares: (M,), sums of their stated probabilities and of the squares of these.
        observed: (M,), number of events that happened.
    """
    num_draws = min(NUM_DRAWS, max(_FEWEST_DRAWS, _MOST_VALUES // max(1, len(size))))
    calibrated = stated - _happened(size, stated, squares, num_draws, generator)
    found = stated - observed
    tilted = np.clip(stated - shrunk(found, calibrated.std(axis=0)), 0.0, size)
    # Keep the relative spread of the stated probabilities within a bin, where that is possible.
    ratio = np.divide(tilted, stated, out=np.ones_like(tilted), where=stated > 0)
    apart = np.clip(squares * ratio**2, tilted**2 / size, tilted)
    noise = tilted - _happened(size, tilted, apart, num_draws, generator)
    return Gaps(found, calibrated, noise, stated < FEWEST_EVENTS)


def largest_gap(size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, level: float) -> dict[str, Any]:
    """Return a simultaneous `interval` for the largest gap over the non-empty bins; the least certain bin makes it wide.

    It combines the interval of each frequency (Clopper and Pearson 1934) with the normal interval of each mean
    probability by Bonferroni, over twice as many intervals as bins. It does not cover gaps in bins that the sample
    leaves empty. Arguments as in drawn_gaps.
    """
    tail = (1 - level) / 2 / (2 * len(size))
    lowest = np.where(observed > 0, special.betaincinv(np.maximum(observed, 1), size - observed + 1, tail), 0.0)
    highest = np.where(observed < size, special.betaincinv(observed + 1, np.maximum(size - observed, 1), 1 - tail), 1.0)
    mean = stated / size
    margin = special.ndtri(1 - tail) * np.sqrt(np.maximum(squares / size - mean**2, 0.0) / size)
    low = np.maximum(np.maximum(lowest - (mean + margin), (mean - margin) - highest), 0.0).max()
    high = np.maximum(mean + margin - lowest, highest - (mean - margin)).max()
    return {
        "low": float(low),
        "high": min(float(high), 1.0),
        "level": level,
        "method": "clopper-pearson",
        "replicates": None,
    }


def shrunk(gaps: NDArray, spread: NDArray) -> Floats:
    """Move gaps (M,) towards 0 by `spread` (M,), but not past it."""
    return np.sign(gaps) * np.maximum(np.abs(gaps) - spread, 0.0)


def _happened(size: NDArray, sums: NDArray, squares: NDArray, num_draws: int, generator: np.random.Generator) -> Floats:
    """Draw how many of `size` independent events happen, (R, M), given the sums of their probabilities and of the squares.

    Each draw is a binomial that matches mean and variance, of the rarer of event and complement (Ehm 1991, Statistics
    and Probability Letters 11, 7; here the number of trials is matched as well).
    """
    is_common = sums > size - sums
    mean = np.where(is_common, size - sums, sums)
    square = np.where(is_common, size - 2 * sums + squares, squares)
    trials = np.ones(len(mean), dtype=np.int64)
    np.ceil(np.divide(mean**2, square, out=np.ones(len(mean)), where=square > 0) - 1e-9, out=trials, casting="unsafe")
    trials = np.maximum(trials, 1)
    drawn = generator.binomial(trials, np.clip(mean / trials, 0.0, 1.0), size=(num_draws, len(mean)))
    return np.where(is_common, size - drawn, drawn)


def _low(gaps: Gaps, form: CalibrationError, estimate: float, tail: float) -> float:
    """Return the smallest size of shrunken gaps at which more than a share `tail` of samples reach the estimate.

    Bins without a gap get the noise of a calibrated model, so the interval excludes 0 exactly if the test rejects.
    """
    spread = gaps.noise.std(axis=0)
    spread = np.where(spread > 0, spread, np.abs(gaps.observed))

    def at(amount: float) -> Floats:
        return shrunk(gaps.observed, amount * spread)

    def is_rejected(amount: float) -> bool:
        population = at(amount)
        samples = np.where(population == 0, gaps.calibrated, population + gaps.noise)
        return float(np.mean(form.estimate(samples) >= estimate)) <= tail

    return form.size(at(_last_not(is_rejected)))


def _high(gaps: Gaps, form: CalibrationError, estimate: float, tail: float) -> float:
    """Return the largest size of gaps at which more than a share `tail` of samples stay at or below the estimate."""
    sign = np.where(gaps.observed < 0, -1.0, 1.0)
    found = [0.0]
    for direction in (gaps.observed, sign * gaps.noise.std(axis=0)):
        if not direction.any():
            continue

        def is_rejected(amount: float, direction: NDArray = direction) -> bool:
            return float(np.mean(form.estimate(amount * direction + gaps.noise) <= estimate)) <= tail

        found.append(form.size(_last_not(is_rejected) * direction))
    if not gaps.is_rare.any():
        return max(found)
    from_rare = form.estimate(np.where(gaps.is_rare, gaps.noise, 0.0)).mean()
    far = form.estimate(
        sign * np.abs(gaps.noise).max() + gaps.noise
    )  # far from 0, noise adds to an error as often as it subtracts
    return max(*found, min(max(found) + float(from_rare), estimate + float(special.ndtri(1 - tail) * far.std())))


def _last_not(is_true: Callable[[float], bool]) -> float:
    """Return, by bisection from 0, the largest amount up to which a statement is false."""
    low, high = 0.0, 1.0
    for _ in range(_DOUBLINGS):
        if is_true(high):
            break
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return low
