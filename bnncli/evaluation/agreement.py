"""Test whether two estimates agree within a tolerance fixed in advance plus what their standard errors allow.

Our number agrees with a published one if |ours - published| <= tolerance + k sqrt(s_ours^2 + s_published^2). The factor
k follows Cochran and Cox (1957), Experimental Designs, section 4.14: the mean of both sides' two-sided quantiles of
Student's t at LEVEL, weighted by their variances. Two estimates of one number then disagree with probability at most
LEVEL, for any tolerance and however few seeds they rest on. With Welch's degrees of freedom, the probability would be
up to five times that (two seeds against five).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bnncli.lazy import special

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
        """Whether the estimates agree."""
        return self.distance <= self.allowed


def agreement(ours: Estimate, published: Estimate, tolerance: float) -> Agreement:
    """Compare the distance of two estimates with the allowed distance.

    Args:
        tolerance: at least 0, in the unit of the estimates: the difference that has known reasons.
    """
    factor = factor_of(ours, published)
    allowed = tolerance + factor * math.sqrt(ours.variance + published.variance)
    return Agreement(abs(ours.value - published.value), allowed, factor)


def sign(estimate: Estimate, level: float = LEVEL) -> int:
    """Return 1 or -1 if a number is significantly above or below 0, each falsely with probability at most level / 2;

    else 0.
    """
    margin = factor_of(estimate, level=level) * math.sqrt(estimate.variance)
    if abs(estimate.value) <= margin:
        return 0
    return 1 if estimate.value > 0 else -1


def factor_of(*estimates: Estimate, level: float = LEVEL) -> float:
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
