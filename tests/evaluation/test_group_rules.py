"""Rules calibrated on rows in groups: their guarantees hold for a random row of a new group; calibrated by row they do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation.decisions import (
    bounded_mean_p_values,
    fit_acceptance,
    fit_group_threshold,
    fit_outliers,
    fit_precision,
    fit_recall,
    fit_thresholds,
    mean_interval,
    min_scores_for_coverage,
)
from bnncli.evaluation.groups import RowGroups

TRIALS, CORRELATION = 400, 0.9


def groups_of(sizes: NDArray) -> RowGroups:
    return RowGroups(np.repeat(np.arange(len(sizes)), sizes))


def draw_scores(generator: np.random.Generator, num_groups: int) -> tuple[RowGroups, NDArray]:
    """Groups of 1 to 29 rows; scores that are standard normal, and alike within a group; large groups are no others."""
    groups = groups_of(generator.integers(1, 30, size=num_groups))
    shared, own = generator.normal(size=num_groups), generator.normal(size=len(groups.index))
    return groups, math.sqrt(CORRELATION) * groups.spread(shared) + math.sqrt(1 - CORRELATION) * own


def margin(level: float) -> float:
    return 3 * math.sqrt(level * (1 - level) / TRIALS)


def test_a_threshold_by_group_covers_on_average_and_one_by_row_does_not() -> None:
    generator, covered = np.random.default_rng(0), {"rows": [], "groups": []}  # type: ignore[var-annotated]
    for _ in range(TRIALS):
        groups, scores = draw_scores(generator, 10)
        for way, given in (("rows", None), ("groups", groups)):
            (threshold,) = fit_thresholds(scores, None, 0.9, num_classes=2, groups=given)
            covered[way].append(stats.norm.cdf(threshold))
    assert np.mean(covered["rows"]) < 0.9 - 3 * np.std(covered["rows"]) / math.sqrt(TRIALS)
    assert np.mean(covered["groups"]) >= 0.9 - 3 * np.std(covered["groups"]) / math.sqrt(TRIALS)
    assert np.mean(covered["groups"]) < 0.97


def test_large_groups_do_not_outvote_small_ones() -> None:
    """Half of the groups are hard and have one row, the others are easy and have 20."""
    generator, covered = np.random.default_rng(8), {"rows": [], "groups": []}  # type: ignore[var-annotated]
    for _ in range(TRIALS):
        is_hard = generator.random(50) < 0.5
        groups = groups_of(np.where(is_hard, 1, 20))
        scores = generator.normal(size=len(groups.index)) + 2 * groups.spread(is_hard)
        for way, given in (("rows", None), ("groups", groups)):
            (threshold,) = fit_thresholds(scores, None, 0.9, num_classes=2, groups=given)
            covered[way].append(stats.norm.cdf(threshold) / 2 + stats.norm.cdf(threshold - 2) / 2)
    assert np.mean(covered["rows"]) < 0.7
    assert 0.9 - 3 * np.std(covered["groups"]) / math.sqrt(TRIALS) <= np.mean(covered["groups"]) < 0.94


def test_groups_of_one_row_have_the_threshold_of_rows() -> None:
    scores = np.random.default_rng(1).normal(size=99)
    alone = RowGroups(np.arange(99))
    for coverage in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        plain = fit_thresholds(scores, None, coverage, num_classes=2)
        assert fit_thresholds(scores, None, coverage, num_classes=2, groups=alone) == plain
        rate = round(1 - coverage, 2)
        assert fit_outliers(scores, rate, groups=alone) == fit_outliers(scores, rate)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_the_least_number_of_groups_is_the_first_that_has_a_threshold(
    coverage: float, confidence: float | None
) -> None:
    least = min_scores_for_coverage(coverage, confidence)
    for num_groups, is_enough in ((least, True), (least - 1, False)):
        groups = groups_of(np.full(num_groups, 3))
        found = fit_group_threshold(np.arange(3.0 * num_groups), groups, coverage, confidence)
        assert (found is not None) == is_enough


def test_the_mass_of_a_group_is_shared_by_its_rows() -> None:
    groups = RowGroups(np.array([0, 0, 0, 0, 1, 2]))
    # 3 groups and infinity: 1/16 for each row of the first group, 1/4 for the other two rows.
    for coverage, expected in ((1 / 16, 1), (0.125, 2), (0.25, 4), (0.5, 5), (0.75, 6)):
        assert fit_group_threshold(np.arange(1.0, 7.0), groups, coverage) == expected
    assert fit_group_threshold(np.arange(1.0, 7.0), groups, 0.76) is None


def test_every_class_has_the_coverage_by_group() -> None:
    generator, covered = np.random.default_rng(2), []
    for _ in range(TRIALS):
        groups, scores = draw_scores(generator, 30)
        labels = (generator.random(len(scores)) < 0.3).astype(np.int64)
        found = fit_thresholds(scores * (1 + labels), labels, 0.9, num_classes=2, groups=groups)
        covered.append(stats.norm.cdf(found / np.array([1, 2])))
    for share, error in zip(np.mean(covered, axis=0), np.std(covered, axis=0), strict=True):
        assert 0.9 - 3 * error / math.sqrt(TRIALS) <= share < 0.96


CONFIDENCE = 0.9


def shares_that_hold(fit: Callable[[NDArray, RowGroups | None], float], least: float) -> dict[str, float]:
    """The share of calibration sets whose threshold covers at least this much, by row and by group."""
    generator, found = np.random.default_rng(3), {"rows": 0, "groups": 0}
    for _ in range(TRIALS):
        groups, scores = draw_scores(generator, 80)
        for way, given in (("rows", None), ("groups", groups)):
            found[way] += stats.norm.cdf(fit(scores, given)) >= least
    return {way: count / TRIALS for way, count in found.items()}


@pytest.mark.parametrize("rule", ["sets", "recall", "outliers"])
def test_with_a_confidence_most_calibration_sets_cover_by_group_and_not_by_row(rule: str) -> None:
    def fit(scores: NDArray, groups: RowGroups | None) -> float:
        if rule == "sets":
            (threshold,) = fit_thresholds(scores, None, 0.8, num_classes=2, confidence=CONFIDENCE, groups=groups)
            return float(threshold)
        if rule == "outliers":
            return -fit_outliers(-scores, 0.2, CONFIDENCE, groups=groups).threshold
        every = np.ones(len(scores), dtype=bool)
        found = fit_recall(-scores, every, 0.8, CONFIDENCE, of_class=1, groups=groups).threshold
        assert found is not None
        return -found

    found = shares_that_hold(fit, 0.8)
    assert found["rows"] < 0.75
    assert found["groups"] >= CONFIDENCE - margin(CONFIDENCE)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["risk", "precision"])
def test_tested_thresholds_exceed_the_risk_no_more_often_than_is_said_by_group(rule: str) -> None:
    """Whole groups are right or wrong, with one probability of being wrong, just above the risk: accepting any is an error."""
    generator, errors, risk = np.random.default_rng(4), {"rows": 0, "groups": 0}, 0.2
    for _ in range(TRIALS):
        groups = groups_of(generator.integers(1, 30, size=80))
        is_right = groups.spread(generator.random(80) >= 0.205)
        confidence = groups.spread(generator.uniform(0.5, 1, size=80))
        for way, given in (("rows", None), ("groups", groups)):
            if rule == "risk":
                accepts = fit_acceptance(confidence, is_right, risk, CONFIDENCE, groups=given).most_doubt is not None
            else:
                found = fit_precision(confidence, is_right, 1 - risk, CONFIDENCE, of_class=1, groups=given)
                accepts = found.threshold is not None
            errors[way] += accepts
    assert errors["rows"] / TRIALS > 0.15
    assert errors["groups"] / TRIALS <= 1 - CONFIDENCE + margin(CONFIDENCE)


def test_a_low_risk_is_shown_by_group() -> None:
    generator = np.random.default_rng(5)
    groups = groups_of(generator.integers(1, 30, size=300))
    is_right = groups.spread(generator.random(300) >= 0.01)
    rule = fit_acceptance(generator.uniform(0.5, 1, size=len(is_right)), is_right, 0.1, 0.9, groups=groups)
    assert rule.most_doubt is not None
    assert rule.num_accepted > 0.5 * len(is_right)
    assert rule.num_wrong == int((~is_right).sum()) or rule.num_wrong < rule.num_accepted * 0.1


@pytest.mark.long
def test_costs_by_group_are_in_the_interval_as_often_as_is_said_and_by_row_not() -> None:
    generator, held = np.random.default_rng(6), {"rows": 0, "groups": 0}
    for _ in range(TRIALS):
        groups = groups_of(generator.integers(1, 30, size=100))
        costs = groups.spread(generator.beta(0.5, 0.5, size=100))
        for way, values in (("rows", costs), ("groups", groups.means(costs))):
            low, high = mean_interval(values, (0, 1), CONFIDENCE)
            held[way] += low <= 0.5 <= high
    assert held["rows"] / TRIALS < 0.75
    assert held["groups"] / TRIALS >= CONFIDENCE - margin(CONFIDENCE)


@pytest.mark.parametrize("limit", [0.02, 0.1, 0.5])
def test_p_values_of_bounded_means_are_valid_and_bounds_hold(limit: float) -> None:
    generator, size = np.random.default_rng(7), 50
    means = generator.binomial(size, limit, size=20_000) / size
    p_values = bounded_mean_p_values(means, size, limit)
    for level in (0.01, 0.05, 0.2):
        assert (p_values <= level).mean() <= level
    assert bounded_mean_p_values(np.array([0.0]), size, limit)[0] == pytest.approx(min(1, (1 - limit) ** size))
    assert bounded_mean_p_values(np.array([1.0]), size, limit)[0] == 1
    grid = bounded_mean_p_values(np.linspace(0, 1, 101), size, limit)
    assert (np.diff(grid) >= -1e-15).all()
