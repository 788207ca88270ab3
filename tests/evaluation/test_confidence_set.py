"""Marks of the best: by simulation no posterior as good as the best goes unmarked more often than alpha, and power."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from evaluation.test_calibration import as_good_as, draw
from numpy.typing import NDArray
from problems.score_samples import means, noisy_scores
from scipy import stats

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import Sample, confidence_set, holm, standings
from bnncli.evaluation.detection import Ranking, auroc

Draw = Callable[[np.random.Generator, tuple[int, int], int], NDArray]  # (examples, trials) and posteriors


def limit(trials: int) -> float:
    """The level with 3.3 binomial standard errors: one test in a thousand fails by chance."""
    return 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials)


def unmarked(samples: list[Sample], *, higher: bool = False) -> list[bool]:
    """Which posteriors are told to be significantly worse than another."""
    found = confidence_set(samples, higher_is_better=higher, alpha=0.05).p_values
    return [p is not None and p <= 0.05 for p in found]


@pytest.mark.parametrize("spread", [1.0, 20.0], ids=["equal", "unequal"])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("size", [3, 10])
def test_over_seeds_no_equal_posterior_goes_unmarked_more_often_than_alpha(
    size: int, count: int, spread: float
) -> None:
    generator, trials = np.random.default_rng(0), 300
    falsely = 0
    for _ in range(trials):
        seeds = 3 * generator.normal(size=(size, 1))
        values = seeds + generator.normal(size=(size, count)) * np.geomspace(1, spread, count)
        falsely += any(unmarked([Sample(column) for column in values.T]))
    assert falsely / trials <= limit(trials)


def test_the_best_are_marked_as_often_where_others_are_behind_by_any_length() -> None:
    """Two equal best ones, three behind them: near, midway and far, where the bounds come in."""
    generator, trials = np.random.default_rng(1), 250
    for gap in (0.5, 2.0, 6.0, 40.0):
        falsely = 0
        for _ in range(trials):
            values = generator.normal(size=(6, 5)) + np.array([0, 0, gap / 2, gap, 2 * gap])
            falsely += any(unmarked([Sample(column) for column in values.T])[:2])
        assert falsely / trials <= limit(trials)


def correlated(generator: np.random.Generator, shape: tuple[int, int], count: int) -> NDArray:
    shared, own = (generator.standard_normal((*shape, width), dtype=np.float32) for width in (1, count))
    return shared + 0.1 * own


def skewed(generator: np.random.Generator, shape: tuple[int, int], count: int) -> NDArray:
    """Losses with a long tail, of unequal spreads and of mean 1."""
    own = generator.standard_exponential((*shape, count), dtype=np.float32) ** 2 - 2
    spreads = np.geomspace(0.05, 0.3, count, dtype=np.float32)
    return generator.standard_exponential((*shape, 1), dtype=np.float32) + own * spreads


def hits(generator: np.random.Generator, shape: tuple[int, int], count: int) -> NDArray:
    """Who is right: all together on nine in ten, with a few of their own."""
    shared, own, swapped = (generator.random((*shape, width), dtype=np.float32) for width in (1, count, count))
    return np.where(swapped < 0.03, own < 0.9, shared < 0.9)


@pytest.mark.parametrize("draw", [correlated, skewed, hits])
@pytest.mark.parametrize(
    ("size", "count", "trials"), [(2000, 3, 250), pytest.param(2000, 8, 150, marks=pytest.mark.long)]
)
def test_over_examples_no_equal_posterior_goes_unmarked_more_often_than_alpha(
    draw: Draw, size: int, count: int, trials: int
) -> None:
    generator, falsely = np.random.default_rng(2), 0
    weights = np.concatenate([block[0] for block in Bootstrap(199).weights(("test", size))])
    columns = draw(generator, (size, trials), count).astype(np.float32)
    replicates = (weights @ columns.reshape(size, -1) / size).astype(np.float64).reshape(-1, trials, count)
    values = columns.mean(axis=0, dtype=np.float64)
    for trial in range(trials):
        samples = [Sample(values[trial, [place]], replicates[:, trial, place]) for place in range(count)]
        falsely += any(unmarked(samples, higher=draw is hits))
    assert falsely / trials <= limit(trials)


def test_equal_areas_under_the_curve_go_unmarked_no_more_often_than_alpha() -> None:
    generator, trials, size, count = np.random.default_rng(3), 80, 300, 3
    splits = [np.concatenate([b[0] for b in Bootstrap(199).weights((name, size))]) for name in ("test", "far")]
    falsely = 0
    for _ in range(trials):
        inside, outside = (
            generator.normal(size=(size, 1)) + 0.3 * generator.normal(size=(size, count)) + shift for shift in (1.5, 0)
        )
        rankings = [Ranking(inside[:, place], outside[:, place]) for place in range(count)]
        samples = [
            Sample(np.array([one.estimate([auroc])[0]]), one.evaluate([auroc], *splits)[:, 0]) for one in rankings
        ]
        falsely += any(unmarked(samples, higher=True))
    assert falsely / trials <= limit(trials)


def test_equal_calibration_errors_go_unmarked_no_more_often_than_alpha() -> None:
    generator, trials, size, count = np.random.default_rng(4), 80, 2000, 3
    weights = np.concatenate([block[0] for block in Bootstrap(199).weights(("test", size))])
    falsely = 0
    for _ in range(trials):
        confidence = 1 / (
            1 + np.exp(-2 - generator.normal(size=(size, 1)) - 0.3 * generator.normal(size=(size, count)))
        )
        is_right = generator.random((size, count)) < confidence - 0.04
        samples = []
        for place in range(count):
            gaps = np.zeros((size, 15), dtype=np.float32)
            bins = np.minimum((confidence[:, place] * 15).astype(int), 14)
            gaps[np.arange(size), bins] = confidence[:, place] - is_right[:, place]
            found = np.abs(np.concatenate([np.ones((1, size), np.float32), weights]) @ gaps).sum(axis=1) / size
            samples.append(Sample(found[:1].astype(float), found[1:].astype(float)))
        falsely += any(unmarked(samples))
    assert falsely / trials <= limit(trials)


@pytest.mark.parametrize("degrees", [1, 9])
@pytest.mark.parametrize("count", [2, 8])
def test_integration_errors_told_by_few_groups_keep_the_level(count: int, degrees: int) -> None:
    generator, trials = np.random.default_rng(5), 150
    falsely = sum(any(unmarked(noisy_scores(generator, count, degrees, trial))) for trial in range(trials))
    assert falsely / trials <= limit(trials)


def test_without_their_share_integration_errors_are_taken_for_differences() -> None:
    """What the tests above would show if the noise were left out."""
    generator = np.random.default_rng(6)
    falsely = 0
    for trial in range(100):
        samples = [Sample(one.values, one.replicates) for one in noisy_scores(generator, 2, 9, trial)]
        falsely += any(unmarked(samples))
    assert falsely > 50


def test_a_clear_difference_beside_far_ones_is_found_nearly_as_by_a_single_t_test() -> None:
    """Eight posteriors over ten seeds, six of them hopeless: the last two are told apart with the power of one test."""
    generator, trials = np.random.default_rng(7), 120
    shift = 3.5 * math.sqrt(2 / 10)  # standard errors of a difference of means
    found, alone = 0, 0
    for _ in range(trials):
        values = generator.normal(size=(10, 8)) + np.array([0, shift, *[200.0] * 6])
        found += unmarked([Sample(column) for column in values.T])[1]
        alone += stats.ttest_rel(values[:, 1], values[:, 0]).pvalue <= 0.05
    assert alone / trials > 0.7
    assert found >= 0.9 * alone


def test_two_posteriors_have_the_p_value_of_the_paired_t_test() -> None:
    one, other = np.random.default_rng(8).normal(size=(2, 6))
    p_values = confidence_set([Sample(one), Sample(other)], higher_is_better=True, alpha=0.05).p_values
    worse = int(one.mean() > other.mean())
    assert p_values[worse] == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-9)
    assert p_values[1 - worse] == 1


def test_the_first_step_over_seeds_is_bonferroni_over_all_pairs_and_the_bounds() -> None:
    values = np.random.default_rng(9).normal(size=(5, 6)) + np.array([[0.0], [1], [0.2], [0.1], [3]])
    found = confidence_set([Sample(row) for row in values], higher_is_better=False, alpha=0.05).p_values
    pairs = [stats.ttest_rel(values[i], values[j]).pvalue for i in range(5) for j in range(i)]
    assert min(p for p in found if p is not None) == pytest.approx(10 * min(pairs) + 0.005, rel=1e-3)


def test_intervals_of_all_differences_hold_together() -> None:
    generator, trials, missed = np.random.default_rng(10), 400, 0
    for _ in range(trials):
        values = generator.normal(size=(5, 5)) * np.geomspace(1, 4, 5)[:, None]
        reach = confidence_set([Sample(row) for row in values], higher_is_better=False, alpha=0.05).reach
        means_of = values.mean(axis=1)
        missed += bool((np.abs(means_of[:, None] - means_of) > np.nan_to_num(reach, nan=np.inf)).any())
    assert missed / trials <= limit(trials)


def test_the_best_and_those_not_significantly_worse_are_marked() -> None:
    generator = np.random.default_rng(10)
    columns = generator.normal(size=(400, 1)) + 0.1 * generator.normal(size=(400, 4)) + [0.001, 0.0, 1.0, 0.002]
    samples: list[Sample | None] = [*means(columns), None]
    lowest = standings(samples, higher_is_better=False, alpha=0.05)
    best = int(np.argmin(columns.mean(axis=0)))
    assert [one.is_best for one in lowest] == [place == best for place in range(5)]
    assert [one.is_close for one in lowest] == [True, True, False, True, False]
    assert (lowest[best].against, lowest[4].against, lowest[best].p_adjusted) == (None, None, 1)
    assert lowest[2].p_adjusted == pytest.approx(1 / 1001 + 0.005)  # no replicate strays as far; and the bounds
    highest = standings(samples, higher_is_better=True, alpha=0.05)
    assert [one.is_close for one in highest] == [False, False, True, False, False]


def test_of_equal_scores_the_first_is_best_and_all_are_close() -> None:
    found = standings([Sample(np.array([0.5]), np.full(9, 0.5))] * 3, higher_is_better=True, alpha=0.05)
    assert [(one.is_best, one.is_close) for one in found] == [(True, True), (False, True), (False, True)]


def test_where_nothing_can_be_told_nobody_is_told_to_be_worse() -> None:
    without = [Sample(np.array([value])) for value in (0.1, 0.2)]
    unvarying = [Sample(np.full(4, value)) for value in (0.1, 0.2)]
    for samples in (without, unvarying):
        found = standings(samples, higher_is_better=False, alpha=0.05)
        assert [one.is_close for one in found] == [True, True]
        assert found[1].against is not None
        assert (found[1].against.value, found[1].against.p_value) == (pytest.approx(0.1), None)
    assert without[0].standard_error is None


def test_replicates_where_a_score_is_undefined_are_left_out() -> None:
    one, other = means(np.random.default_rng(11).normal(size=(200, 2)) + np.array([0.0, 0.5]))
    assert other.replicates is not None
    patchy = other.replicates.copy()
    patchy[::3] = np.nan
    samples = [one, Sample(other.values, patchy), Sample(np.zeros(1), np.full(1000, np.nan))]
    found = confidence_set(samples, higher_is_better=False, alpha=0.05).p_values
    assert found == [1.0, pytest.approx(1 / 667), None]


def test_a_baseline_is_what_the_others_are_compared_with() -> None:
    samples: list[Sample | None] = [
        Sample(np.array(values)) for values in ([1.0, 2.0, 3.0], [1.5, 2.6, 3.4], [0.9, 2.0, 3.2])
    ]
    found = standings(samples, higher_is_better=True, alpha=0.1, baseline=0)
    assert found[0].against is None
    assert found[1].against is not None
    assert found[1].against.value == pytest.approx(0.5)
    assert [one.is_best for one in found] == [False, True, False]
    expected = holm([stats.ttest_rel(s.values, samples[0].values).pvalue for s in samples[1:]])  # type: ignore[union-attr]
    assert [one.p_adjusted for one in found[1:]] == pytest.approx(expected)
    assert all(
        one.against is None for one in standings([None, samples[0]], higher_is_better=True, alpha=0.1, baseline=0)
    )


def test_a_score_that_is_neither_better_high_nor_low_has_no_best() -> None:
    samples = means(np.random.default_rng(11).normal(size=(50, 2)))
    assert standings(samples, higher_is_better=None, alpha=0.05) == standings(
        [None, None], higher_is_better=True, alpha=0.05
    )
    assert standings(samples, higher_is_better=None, alpha=0.05, baseline=0)[1].against is not None


@pytest.mark.long
@pytest.mark.parametrize(("size", "most"), [(100, 0.155), (1000, 0.085), (3000, 0.05)])
def test_few_examples_with_rare_large_losses_leave_out_equals_as_often_as_compare_says(size: int, most: float) -> None:
    trials, scale, left_out = 300, 4.0, 0
    pairs = zip(*draw(size, trials, scale, as_good_as(scale)), strict=True)
    weights = np.concatenate([block for (block,) in Bootstrap(num_replicates=400).weights(("test", size))])
    for pair in pairs:
        samples = [Sample(np.array([losses.mean()]), weights @ losses / size) for losses in pair]
        found = confidence_set(samples, higher_is_better=False, alpha=0.05).p_values
        left_out += any(p is not None and p <= 0.05 for p in found)
    assert left_out / trials <= most + 3.3 * math.sqrt(most * (1 - most) / trials)
