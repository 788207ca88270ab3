"""Ranks of thresholds against loops over all of them, with the exact law of what a threshold covers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from bnncli.evaluation.decisions import covering_rank, excluding_rank, least_for_coverage, least_for_rate

SIZES = (1, 8, 9, 10, 19, 99, 100, 999)
LEVELS = (0.5, 0.7, 0.9, 0.93, 0.95, 0.99)


@pytest.mark.parametrize("level", LEVELS)
def test_the_covering_rank_is_the_smallest_whose_mean_coverage_is_enough(level: float) -> None:
    for size in SIZES:
        enough = [k for k in range(1, size + 1) if Fraction(k, size + 1) >= Fraction(str(level))]
        assert covering_rank(size, level) == (enough[0] if enough else None)


@pytest.mark.parametrize("level", LEVELS)
def test_the_excluding_rank_is_the_largest_whose_mean_rate_is_small_enough(level: float) -> None:
    rate = float(str(round(1 - level, 2)))
    for size in SIZES:
        few = [k for k in range(1, size + 1) if Fraction(k, size + 1) <= Fraction(str(rate))]
        assert excluding_rank(size, rate) == (few[-1] if few else None)


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_with_a_confidence_are_quantiles_of_the_beta_law(level: float) -> None:
    for size in SIZES:
        ranks = np.arange(1, size + 1)
        laws = stats.beta(ranks, size + 1 - ranks)
        enough = ranks[laws.sf(level) >= 0.95]
        assert covering_rank(size, level, 0.95) == (enough[0] if len(enough) else None)
        few = ranks[laws.cdf(1 - level) >= 0.95]
        assert excluding_rank(size, 1 - level, 0.95) == (few[-1] if len(few) else None)


@pytest.mark.parametrize("confidence", [None, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("level", LEVELS)
def test_the_least_number_is_the_first_that_has_a_rank(level: float, confidence: float | None) -> None:
    least = least_for_coverage(level, confidence)
    assert covering_rank(least, level, confidence) is not None
    assert covering_rank(least - 1, level, confidence) is None
    least = least_for_rate(round(1 - level, 2), confidence)
    assert excluding_rank(least, round(1 - level, 2), confidence) is not None
    assert excluding_rank(least - 1, round(1 - level, 2), confidence) is None
