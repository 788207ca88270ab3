"""The Monte Carlo error of a score: how much it would change with other draws of the posterior, from groups of them.

Delete-a-group jackknife: Wolter (2007), Introduction to Variance Estimation, chapter 4; Shao and Tu (1995), The Jackknife
and Bootstrap, section 2.3. It says nothing of the examples: with others the score would change too, and that error comes
on top (bootstrap.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError

Probs = NDArray[np.float64]


@dataclass(frozen=True)
class DrawGroups:
    """Mean class probabilities of disjoint, (nearly) independent groups of the draws behind one prediction.

    Args:
        probs: (G, R, C), G at least 2; may be mapped from a file.
        weights: (G,), each group's share of the draws, or of their importance weights; they sum to one.
    """

    probs: NDArray
    weights: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.probs.ndim != 3 or self.weights.shape != self.probs.shape[:1] or len(self.weights) < 2:
            shapes = f"{self.probs.shape} and {self.weights.shape}"
            raise DataError(
                f"groups of draws: expected probs (G, R, C) and weights (G,) with G at least 2, got {shapes}"
            )
        if not (np.all(self.weights >= 0) and np.all(self.weights < 1) and abs(self.weights.sum() - 1) < 1e-6):
            raise DataError(f"groups of draws: expected weights in [0, 1) that sum to one, got {self.weights}")

    def __len__(self) -> int:
        return len(self.weights)

    def mean(self) -> Probs:
        """The prediction of all draws, (R, C)."""
        return self._mixed(self.weights)

    def without(self, group: int) -> Probs:
        """The prediction of the draws of all groups but one, (R, C)."""
        left = self.weights.copy()
        left[group] = 0
        return self._mixed(left / left.sum())

    def _mixed(self, shares: NDArray[np.float64]) -> Probs:
        mixed = np.zeros(self.probs.shape[1:])
        for share, probs in zip(shares, self.probs, strict=True):
            if share:
                mixed += share * probs.astype(np.float64)
        return mixed


@dataclass(frozen=True)
class IntegrationError:
    """What the groups say of a score's Monte Carlo error.

    Args:
        variance: of the score over fresh draws, in its unit squared; NaN where the score is not finite.
        degrees_of_freedom: of that estimate, as of a sample variance: G - 1, or less where the weights are uneven.
    """

    variance: float
    degrees_of_freedom: float

    @property
    def standard_error(self) -> float:
        """Square root of the variance, in the score's unit."""
        return math.sqrt(self.variance)


def integration_error(score: Callable[..., float], *splits: DrawGroups) -> IntegrationError:
    """The Monte Carlo variance of score(probs of the first split, of the second, ...), each (R, C) float64.

    With v_g the score of all draws but group g's, w_g that group's weight and v the mean of the v_g with weights
    proportional to 1 - w_g, the variance is the sum of (1 - w_g) (v_g - v)^2. For equal weights this is (G - 1) / G times
    the sum of squares, Wolter's equation 4.2.3 with v in the middle; for groups of unequal sizes it is unbiased for a mean;
    for a ratio, as with importance weights, it is the linearised variance of the ratio with the jackknife's correction.

    Args:
        score: any function of the probabilities; labels and what else it needs are its own.
        splits: one, or several whose group g holds the same draws (an in- and an out-of-distribution split).

    Raises:
        DataError: the splits have different numbers of groups, or weights.
    """
    weights = splits[0].weights
    for other in splits[1:]:
        if other.weights.shape != weights.shape or not np.allclose(other.weights, weights, rtol=0, atol=1e-9):
            raise DataError("groups of draws: the splits were not predicted by the same draws")
    left = np.array([float(score(*(split.without(group) for split in splits))) for group in range(len(weights))])
    shares = 1 - weights
    middle = shares @ left / shares.sum()
    return IntegrationError(float(shares @ (left - middle) ** 2), _degrees_of_freedom(weights))


def _degrees_of_freedom(weights: NDArray[np.float64]) -> float:
    """Satterthwaite's, of the sum of G independent squares whose means are as the squared weights; G - 1 for equal ones."""
    squares = weights**2
    return float(squares.sum() ** 2 / (squares**2).sum()) * (1 - 1 / len(weights))
