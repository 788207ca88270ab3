"""The shift alarm: exact p-values against every order of two samples, and its level whatever the sizes and ties."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from bnncli.evaluation import decisions
from bnncli.evaluation.decisions import SMALLEST_P, ShiftRule, distance_p_value, largest_gap


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 6), (4, 4), (3, 7), (6, 5), (8, 2)])
def test_p_values_are_the_share_of_all_orders(n: int, m: int) -> None:
    orders = [np.isin(np.arange(n + m), chosen) for chosen in combinations(range(n + m), n)]
    gaps = np.array([largest_gap(np.flatnonzero(one), np.flatnonzero(~one)) for one in orders])
    for gap in np.unique(gaps):
        assert distance_p_value(int(gap), n, m) == pytest.approx(np.mean(gaps >= gap), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(50, 50), (200, 37), (1000, 3000)])
def test_p_values_are_those_of_scipy(n: int, m: int) -> None:
    generator = np.random.default_rng(10)
    for by in (0.0, 0.1, 0.2):
        one, other = generator.normal(size=n), generator.normal(by, size=m)
        expected = stats.ks_2samp(one, other, method="exact")
        assert largest_gap(one, other) / (n * m) == pytest.approx(expected.statistic, abs=1e-12)
        found = distance_p_value(largest_gap(one, other), n, m)
        assert found == pytest.approx(max(expected.pvalue, SMALLEST_P), abs=1e-9)


@pytest.mark.parametrize("size", [1, 10, 400])
@pytest.mark.parametrize("digits", [1, 9])
def test_the_level_holds_for_batches_of_any_size_and_with_ties(
    monkeypatch: pytest.MonkeyPatch, size: int, digits: int
) -> None:
    monkeypatch.setattr(decisions, "distance_p_value", cache(distance_p_value))  # of the few gaps that there are
    generator, level, repeats = np.random.default_rng(11), 0.1, 2000
    alarms = 0
    for _ in range(repeats):
        scores = np.round(generator.random(100 + size), digits)
        rule = ShiftRule(np.sort(scores[:100]), level)
        p_value = rule.p_value(scores[100:])
        assert p_value is not None
        alarms += p_value <= level
    assert alarms / repeats <= level + 3 * (level * (1 - level) / repeats) ** 0.5
    assert size != 400 or digits == 1 or alarms / repeats > 0.07  # and hardly less


def test_a_shift_is_seen() -> None:
    generator = np.random.default_rng(12)
    rule = ShiftRule(np.sort(generator.random(1000)), 0.01)
    assert rule.p_value(generator.random(1000) ** 1.3) < 1e-4
    assert rule.p_value(np.zeros(5000)) == SMALLEST_P
    assert rule.p_value(rule.scores) == 1.0
    assert rule.p_value(np.zeros(0)) is None
