"""The exact interval of a frequency: scipy's, and its level holds for every probability."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from bnncli.evaluation.curves import frequency_interval


@pytest.mark.parametrize(("happened", "count"), [(0, 1), (1, 1), (3, 10), (57, 60), (1, 400)])
def test_the_ends_are_those_of_scipy(happened: int, count: int) -> None:
    expected = binomtest(happened, count).proportion_ci(0.95, method="exact")
    assert frequency_interval(happened / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("count", [1, 7, 30, 200])
def test_it_holds_the_probability_at_least_as_often_as_it_says(count: int) -> None:
    """By the binomial distribution itself, in place of a simulation."""
    ends = np.array([frequency_interval(happened / count, count) for happened in range(count + 1)])
    for probability in np.linspace(0.005, 0.995, 199):
        is_held = (ends[:, 0] <= probability) & (probability <= ends[:, 1])
        assert binom.pmf(np.arange(count + 1), count, probability)[is_held].sum() >= 0.95 - 1e-12
