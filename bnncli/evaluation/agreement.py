"""Whether two estimates agree: within a tolerance that was stated beforehand, and what their standard errors allow.

Of a published number and ours: |ours - published| <= tolerance + k sqrt(s_ours^2 + s_published^2). k is that of Cochran and Cox (1957),
Experimental Designs, section 4.14: the mean of both sides' quantiles of Student's t, whose two tails have LEVEL together, weighted by
their variances. Two estimates of one number then differ with probability LEVEL at most, whatever the tolerance and however few seeds stand behind
them; with the degrees of freedom of Welch it would be up to five times that (two seeds beside five).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bnncli.lazy import special

LEVEL = 0.01  # probability that two estimates of the same number are said to differ, or to stand in an order


@dataclass(frozen=True)
class Estimate:
    """A number as it was measured.

    Args:
        value: finite.
        standard_error: in its unit, at least 0, which says that all values were the same; None where it is not known, which counts as none.
        count: values behind the standard error, as seeds or checkpoints; 0 where these are so many (examples, draws) that it is known.

    Raises:
        ValueError: a value that is none.
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
        """The mean of values, with its standard error where there are several."""
        count, mean = len(values), statistics.fmean(values)
        return cls(mean, statistics.stdev(values) / math.sqrt(count), count) if count > 1 else cls(mean)

    @classmethod
    def of_share(cls, share: float, trials: int) -> Estimate:
        """A share of trials. Its standard error is the longer side of the exact interval (Clopper and Pearson 1934) of probability 1 - LEVEL over
        its factor: above 0 also where all trials gave the same.
        """
        count = round(share * trials)
        low = float(special.betaincinv(count, trials - count + 1, LEVEL / 2)) if count else 0.0
        high = float(special.betaincinv(count + 1, trials - count, 1 - LEVEL / 2)) if count < trials else 1.0
        return cls(share, max(share - low, high - share) / quantile(math.inf))

    @property
    def variance(self) -> float:
        """The standard error, squared; 0 where it is not known."""
        return (self.standard_error or 0.0) ** 2


class Agreement(NamedTuple):
    """A judgement: the distance, what of it is allowed, and the factor of the combined standard error in that."""

    distance: float
    allowed: float
    factor: float

    @property
    def is_within(self) -> bool:
        """Whether the estimates agree."""
        return self.distance <= self.allowed


def agreement(ours: Estimate, published: Estimate, tolerance: float) -> Agreement:
    """How far two estimates are apart, beside how far they may be.

    Args:
        tolerance: at least 0, in their unit: what may differ for reasons that are known.
    """
    factor = factor_of(ours, published)
    allowed = tolerance + factor * math.sqrt(ours.variance + published.variance)
    return Agreement(abs(ours.value - published.value), allowed, factor)


def sign(estimate: Estimate, level: float = LEVEL) -> int:
    """1 or -1 where a number is above or below 0 beyond chance, each falsely with probability level / 2 at most; 0 where that is open."""
    margin = factor_of(estimate, level=level) * math.sqrt(estimate.variance)
    if abs(estimate.value) <= margin:
        return 0
    return 1 if estimate.value > 0 else -1


def factor_of(*estimates: Estimate, level: float = LEVEL) -> float:
    """The factor k of the combined standard error of estimates: 2.576 where all of them are known, 9.92 of one over three seeds."""
    parts = [(one.variance, quantile(one.count - 1 if one.count else math.inf, level)) for one in estimates]
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return quantile(math.inf, level)
    return sum(variance * factor for variance, factor in parts) / total


@cache
def quantile(degrees: float, level: float = LEVEL) -> float:
    """The factor of a standard error with these degrees of freedom; 2.576 for infinitely many."""
    if math.isinf(degrees):
        return float(special.ndtri(1 - level / 2))
    return float(special.stdtrit(degrees, 1 - level / 2))
