"""Test the uniformity of ranks by their whole distribution function at once, exactly.

Säilynoja, Bürkner and Vehtari (2022), arXiv:2103.10522. If ranks are uniform, the counts of ranks below each of many
points form a chain of binomial steps, so the probability that they stay within any bounds is a sum over paths. The
bounds are pointwise binomial intervals of one common level, chosen such that a path leaves them anywhere with
probability alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

MOST_POINTS = 100  # points where the distribution function is compared with its bounds
_HALVINGS = 40

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RankLaw:
    """Uniform ranks 0..num_draws of independent simulations.

    Args:
        num_simulations: M.
        num_draws: L, number of draws that the true value is ranked among.
    """

    num_simulations: int
    num_draws: int

    def __post_init__(self) -> None:
        if self.num_simulations < 2 or self.num_draws < 1:
            raise ValueError(f"expected at least 2 simulations and 1 draw, got {self!r}")

    @property
    def points(self) -> Counts:
        """Ranks (Q,) below which ranks are counted: 1..L, or a subset."""
        return np.unique(np.linspace(1, self.num_draws, min(self.num_draws, MOST_POINTS)).round().astype(np.int64))

    @property
    def shares(self) -> Floats:
        """Expected share of ranks below each point, (Q,)."""
        return self.points / (self.num_draws + 1)

    def counts(self, ranks: Counts) -> Counts:
        """Count the ranks (M,) below each point, (Q,)."""
        return np.searchsorted(np.sort(ranks), self.points, side="left").astype(np.int64)

    def p_value(self, ranks: Counts) -> float:
        """Return the probability that uniform ranks leave, anywhere, pointwise intervals as narrow as these ranks (M,) do."""
        counts = self.counts(ranks)
        tails = _tails(self.num_simulations, self.num_draws)
        return self._leaving(float(tails[np.arange(len(counts)), counts].min()))

    def bounds(self, level: float) -> tuple[Counts, Counts]:
        """Return bounds (Q,) on the counts that uniform ranks respect with probability at least 1 - level.

        Ranks violate them exactly if p_value is at most `level`.
        """
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._leaving(middle) <= level else (low, middle)
        return self._allowed(low)

    def _allowed(self, tail: float) -> tuple[Counts, Counts]:
        """Return the lowest and highest counts whose two-sided tail exceeds `tail`."""
        is_in = _tails(self.num_simulations, self.num_draws) > tail
        return is_in.argmax(axis=1), is_in.shape[1] - 1 - is_in[:, ::-1].argmax(axis=1)

    def _leaving(self, tail: float) -> float:
        """Return the probability that a path has a two-sided tail of at most `tail` anywhere."""
        if tail >= _tails(self.num_simulations, self.num_draws).max(axis=1).min():
            return 1.0
        return float(np.clip(1.0 - _staying(self.num_simulations, self.shares, *self._allowed(tail)), 0.0, 1.0))


@cache
def _tails(num_simulations: int, num_draws: int) -> Floats:
    """Return twice the smaller tail of each count 0..M at each point, (Q, M + 1); both tails include the count."""
    shares = RankLaw(num_simulations, num_draws).shares[:, None]
    counts = np.arange(num_simulations + 1)[None, :]
    below = special.bdtr(counts, num_simulations, shares)
    above = np.concatenate([np.ones_like(shares), special.bdtrc(counts[:, :-1], num_simulations, shares)], axis=1)
    tails: Floats = 2 * np.minimum(below, above)
    return tails


def _staying(num: int, shares: Floats, lowest: Counts, highest: Counts) -> float:
    """Return the probability that the counts of `num` uniform numbers below each share all stay within the bounds."""
    counts = np.arange(lowest[0], highest[0] + 1)
    mass = _binomial(counts, np.array(num), shares[0])
    for place in range(1, len(shares)):
        following = np.arange(lowest[place], highest[place] + 1)
        step = (shares[place] - shares[place - 1]) / (1 - shares[place - 1])
        mass = mass @ _binomial(following[None, :] - counts[:, None], (num - counts)[:, None], step)
        counts = following
    return float(mass.sum())


def _binomial(counts: Counts, num: Counts, share: float) -> Floats:
    """Return the binomial probability of each count; 0 for impossible counts."""
    is_possible = (counts >= 0) & (counts <= num)
    some = np.where(is_possible, counts, 0)
    logs = special.gammaln(num + 1.0) - special.gammaln(some + 1.0) - special.gammaln(num - some + 1.0)
    logs = logs + some * np.log(share) + (num - some) * np.log1p(-share)
    found: Floats = np.where(is_possible, np.exp(logs), 0.0)
    return found
