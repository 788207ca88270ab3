"""Calibration errors against chance: what a calibrated model would score, and intervals for the error of the population.

Gaps between stated and observed frequencies are never 0 in a sample: a calibrated model has errors too, more of them the
fewer the examples. Consistency resampling (Broecker and Smith 2007, Weather and Forecasting 22, 651) draws the labels of
a calibrated model from the probabilities themselves; the mean of its errors is the floor of the value, and how often they
reach it is a test of calibration.

The intervals invert such tests: of every size of gaps it is asked whether a sample would give what was observed, with
noise drawn at frequencies between the stated and the observed ones. The same size can be spread in many ways. The lower
end takes gaps that were shrunk towards 0 by a multiple of their noise (few gaps, much noise beside them), the upper end
the larger of the observed gaps scaled and of gaps in proportion to their noise, which give the smallest values of all of
their size; of bins with few events it counts no noise at all, up to the value itself and its standard error. 0 is in an interval of level 1 - alpha exactly where the test has a p-value of at least alpha / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.weighted_scores import Floats
from bnncli.lazy import special

NUM_DRAWS = 1000  # of the labels of a calibrated model
_FEWEST_DRAWS = 200
_MOST_VALUES = 1 << 16  # draws of all bins together; fewer draws where there are many bins
FEWEST_EVENTS = 5  # stated events of a bin, below which its noise is no guide
_STEPS = 14  # of a bisection: the ends are exact to a few thousandths of the width
_DOUBLINGS = 40


@dataclass(frozen=True)
class Gaps:
    """Stated less observed frequencies of M bins, as sums over the examples of each bin.

    Args:
        observed: (M,).
        calibrated: (R, M), draws of a calibrated model.
        noise: (R, M), draws of what a sample adds to the gaps of the population; of mean 0.
        is_rare: (M,), bins of so few events that the noise of other frequencies may be much less.
    """

    observed: Floats
    calibrated: Floats
    noise: Floats
    is_rare: NDArray[np.bool_]


@dataclass(frozen=True)
class CalibrationError:
    """One calibration error as a function of gaps.

    Args:
        estimate: gaps (R, M) of samples to their errors (R,), which may be below 0 where noise is taken off.
        size: gaps (M,) of a population to its error.
        is_inverted: whether its interval inverts tests; false for the largest gap, whose size says nothing of the others.
    """

    estimate: Callable[[Floats], Floats]
    size: Callable[[Floats], float]
    is_inverted: bool = True


def against_chance(gaps: Gaps, form: CalibrationError, *, level: float) -> dict[str, Any]:
    """What is known of a calibration error: its `floor`, `p_calibrated` and `interval`.

    Args:
        level: of the interval, between 0 and 1.
    """
    estimate = float(form.estimate(gaps.observed[None])[0])
    found = floor_of(gaps, form)
    tail = (1 - level) / 2
    low = 0.0 if found["p_calibrated"] >= tail else _low(gaps, form, estimate, tail)
    high = max(low, _high(gaps, form, estimate, tail))
    ends = {"low": min(low, 1.0), "high": min(high, 1.0), "level": level, "method": "inverted"}
    return {**found, "interval": {**ends, "replicates": len(gaps.calibrated)}}


def floor_of(gaps: Gaps, form: CalibrationError) -> dict[str, float]:
    """The mean error of a calibrated model, `floor`, and how often it is at least what was observed, `p_calibrated`."""
    estimate = float(form.estimate(gaps.observed[None])[0])
    drawn = form.estimate(gaps.calibrated)
    reached = int(np.sum(drawn >= estimate - 1e-12))  # the same sum in another order is the same
    return {"floor": float(np.maximum(drawn, 0.0).mean()), "p_calibrated": (1 + reached) / (1 + len(drawn))}


def drawn_gaps(
    size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, generator: np.random.Generator
) -> Gaps:
    """Gaps of bins in which events happen, or do not, independently.

    Args:
        size: (M,) possible events of each bin, at least 1.
        stated, squares: (M,) sums of their stated probabilities, and of the squares of these.
        observed: (M,) how many of them happened.
    """
    num_draws = min(NUM_DRAWS, max(_FEWEST_DRAWS, _MOST_VALUES // max(1, len(size))))
    calibrated = stated - _happened(size, stated, squares, num_draws, generator)
    found = stated - observed
    tilted = np.clip(stated - shrunk(found, calibrated.std(axis=0)), 0.0, size)
    # Probabilities of a bin that are as far apart, as a share of their mean, as the stated ones, where that is possible.
    ratio = np.divide(tilted, stated, out=np.ones_like(tilted), where=stated > 0)
    apart = np.clip(squares * ratio**2, tilted**2 / size, tilted)
    noise = tilted - _happened(size, tilted, apart, num_draws, generator)
    return Gaps(found, calibrated, noise, stated < FEWEST_EVENTS)


def largest_gap(size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, level: float) -> dict[str, Any]:
    """The `interval` of the largest gap of the bins that hold examples: of all at once, so that the least sure makes it wide.

    A gap of the population in a bin that this sample does not reach is not in it.

    Clopper and Pearson's (1934) interval of each frequency, and the normal one of each mean probability, each bin at its
    share of 1 - level (Bonferroni, of twice as many intervals as bins). Arguments as of drawn_gaps.
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
    """Gaps (M,) brought nearer to 0 by `spread` (M,), and no further than that."""
    return np.sign(gaps) * np.maximum(np.abs(gaps) - spread, 0.0)


def _happened(size: NDArray, sums: NDArray, squares: NDArray, num_draws: int, generator: np.random.Generator) -> Floats:
    """Draws (R, M) of how many of `size` independent events happen whose probabilities have these sums and squares.

    Binomials of the same mean and variance, of the rarer of the event and its opposite (Ehm 1991, Statistics and
    Probability Letters 11, 7; with the number of trials matched as well).
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
    """The smallest size of shrunken gaps of which more than a share `tail` of samples reach the estimate.

    A bin without a gap has the noise of a calibrated model, so that no gaps at all are rejected where the test rejects.
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
    """The largest size of gaps of which more than a share `tail` of samples stay at or below the estimate."""
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
    )  # where noise adds to an error as it takes from it
    return max(*found, min(max(found) + float(from_rare), estimate + float(special.ndtri(1 - tail) * far.std())))


def _last_not(is_true: Callable[[float], bool]) -> float:
    """The largest amount, from 0, up to which a statement is not true; a bisection."""
    low, high = 0.0, 1.0
    for _ in range(_DOUBLINGS):
        if is_true(high):
            break
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return low
