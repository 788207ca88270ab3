"""Counts of confidences in bins against the curves of all examples; densities and ranks against numpy and scipy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binom, binomtest

from bnncli.evaluation.comparison import LEVEL, Estimate, agreement, error_factor, quantile, sign
from bnncli.evaluation.convergence import RankLaw, convergence, parameter_statistics
from bnncli.evaluation.curves import (
    BAND,
    MOST_POINTS,
    bin_confidence,
    block_means,
    density_grid,
    estimate_density,
    frequency_interval,
    histogram,
    quantile_indices,
    rank_band,
    rank_counts,
    reliability_curve,
    risk_coverage_curve,
    roc_curve,
    standardised_distances,
)
from bnncli.evaluation.statistics import BLOCK_VALUES, compute_example_statistics


def predictions(num_examples: int, seed: int, sharpness: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    probs = np.exp(sharpness * rng.normal(size=(num_examples, 4)))
    probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
    labels = (probs.cumsum(axis=1) > rng.random((num_examples, 1))).argmax(axis=1)
    return probs, labels


@pytest.fixture(scope="module")
def many() -> tuple[np.ndarray, np.ndarray]:
    return predictions(BLOCK_VALUES // 4 + 1000, 0)  # two blocks


def test_reliability_is_that_of_all_examples(many: tuple[np.ndarray, np.ndarray]) -> None:
    expected, found = reliability_curve(compute_example_statistics(*many)), bin_confidence(*many).reliability()
    assert (found["edges"], found["count"]) == (expected["edges"], expected["count"])
    for name in ("confidence", "accuracy"):
        np.testing.assert_allclose(np.array(found[name], float), np.array(expected[name], float), rtol=1e-12)


def test_curves_go_through_points_of_those_of_all_examples(many: tuple[np.ndarray, np.ndarray]) -> None:
    inside, outside = bin_confidence(*many), bin_confidence(predictions(5000, 1, 1.0)[0], None)
    confidence, far = many[0].max(axis=1).astype(float), predictions(5000, 1, 1.0)[0].max(axis=1).astype(float)
    roc = inside.roc(outside)
    assert len(roc["fpr"]) <= MOST_POINTS
    for fpr, tpr in zip(roc["fpr"][1:-1], roc["tpr"][1:-1], strict=True):
        threshold = np.sort(far)[::-1][round(fpr * len(far)) - 1] if fpr else 1.0
        assert (confidence > threshold).mean() <= tpr + 1e-6
        assert tpr <= (confidence >= np.sort(far)[::-1][min(round(fpr * len(far)), len(far) - 1)]).mean() + 1e-6
    risk = inside.risk_coverage()
    order = np.argsort(-confidence, kind="stable")
    wrong = np.cumsum(many[0].argmax(axis=1)[order] != many[1][order])
    for coverage, error in zip(risk["coverage"], risk["risk"], strict=True):
        count = round(coverage * len(confidence))
        assert error == pytest.approx(wrong[count - 1] / count, abs=1e-5)
    assert risk["risk"][-1] == pytest.approx(1 - (inside.accuracy or 0.0), abs=1e-6)


def test_areas_below_thinned_curves_are_those_of_all_points(many: tuple[np.ndarray, np.ndarray]) -> None:
    far = predictions(5000, 1, 1.0)[0]
    found = bin_confidence(*many).roc(bin_confidence(far, None))
    whole = roc_curve(many[0].max(axis=1), far.max(axis=1))
    assert np.trapezoid(found["tpr"], found["fpr"]) == pytest.approx(np.trapezoid(whole["tpr"], whole["fpr"]), abs=2e-3)
    risk, every = (
        bin_confidence(*many).risk_coverage(),
        risk_coverage_curve(many[0].max(axis=1), many[0].argmax(axis=1) == many[1]),
    )
    assert risk is not None
    area, expected = (np.trapezoid(one["risk"], one["coverage"]) for one in (risk, every))
    assert area == pytest.approx(expected, abs=2e-3)


def test_rows_at_the_ends_are_those_of_a_sort_and_the_first_of_equals(many: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = many[0].copy(), many[1]
    probs[[5, BLOCK_VALUES // 4 + 7]] = [[1, 0, 0, 0]]
    found, confidence = bin_confidence(probs, labels, num_extremes=4), probs.max(axis=1)
    assert [one.row for one in found.least_certain] == np.argsort(confidence, kind="stable")[:4].tolist()
    assert [one.row for one in found.most_certain] == np.argsort(-confidence, kind="stable")[:4].tolist()
    wrong = np.flatnonzero(probs.argmax(axis=1) != labels)
    expected = wrong[np.argsort(-confidence[wrong], kind="stable")[:4]].tolist()
    assert [one.row for one in found.most_certain_errors] == expected
    one = found.least_certain[0]
    assert (one.predicted, one.label) == (int(probs[one.row].argmax()), int(labels[one.row]))


def test_bins_hold_their_upper_edge() -> None:
    found = bin_confidence(np.array([[0.5, 0.5], [0.75, 0.25], [1, 0]], np.float32), None)
    assert [place for place, count in enumerate(found.histogram()) if count] == [9, 14, 19]


def test_nothing_and_no_labels_have_no_curves() -> None:
    empty = bin_confidence(np.empty((0, 3), np.float32), np.empty(0, np.int64), num_extremes=2)
    some = bin_confidence(predictions(10, 3)[0], None, num_extremes=2)
    assert (empty.num_examples, empty.risk_coverage(), empty.roc(some), some.roc(empty)) == (0, None, None, None)
    assert (some.reliability(), some.risk_coverage(), some.accuracy, some.most_certain_errors) == (None, None, None, [])
    assert sum(some.histogram()) == 10


def test_the_density_of_normal_draws_is_normal() -> None:
    draws, grid = np.random.default_rng(0).normal(1, 2, size=20_000), np.linspace(-5, 7, 41)
    found = estimate_density(draws, grid)
    assert found is not None
    np.testing.assert_allclose(found, stats.norm(1, 2).pdf(grid), atol=0.012)
    width = 0.9 * min(draws.std(ddof=1), stats.iqr(draws) / 1.34) * len(draws) ** -0.2
    np.testing.assert_allclose(found, stats.gaussian_kde(draws, width / draws.std(ddof=1))(grid), rtol=1e-8)
    assert estimate_density(np.full(50, 3.0), grid) is None


def test_weights_are_chosen_by_how_far_posteriors_lie_apart() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(400, 5)).astype(np.float32)
    sizes = standardised_distances(
        reference, {"a": reference + np.array([0, 1, 0, 3, 0]), "b": reference + np.array([0, 0, 2, 0, 0])}
    )
    assert np.argsort(sizes)[-3:].tolist() == [1, 2, 3]
    assert quantile_indices(sizes, (1.0, 0.75, 0.5)) == [3, 2, 1]
    assert quantile_indices(sizes[:1], (1.0, 0.5)) == [0]
    grid = density_grid([reference[:, 0], reference[:, 0] + 9], 11)
    assert grid[0] < -3
    assert grid[-1] > 12


def test_block_means_and_ranks_are_those_of_numpy() -> None:
    draws = np.random.default_rng(0).normal(size=(3, 40)).round(1)  # with ties
    middles, means = block_means(draws, 8)
    assert middles == [3 + 5 * block for block in range(8)]
    np.testing.assert_allclose(means, draws.reshape(3, 8, 5).mean(axis=2))
    counts = rank_counts(draws, 4)
    ranks = stats.rankdata(draws.ravel(), method="average").reshape(3, 40) - 1
    expected = [np.bincount(np.minimum((chain / 120 * 4).astype(int), 3), minlength=4) for chain in ranks]
    np.testing.assert_array_equal(counts, expected)


def test_a_step_of_independent_chains_leaves_the_band_as_often_as_it_says() -> None:
    low, high = rank_band(200, 10)
    law = stats.binom(200, 0.1)
    inside = law.cdf(high) - law.cdf(low - 1)
    assert BAND <= inside < BAND + 0.01


def test_statistics_of_parameters_have_the_worst_that_convergence_tells() -> None:
    draws = np.random.default_rng(0).normal(size=(4, 100, 6)).astype(np.float32)
    draws[0, :, 2] += 1
    found, worst = parameter_statistics(draws), convergence(draws)
    assert float(found.r_hat.max()) == worst.r_hat
    assert int(found.r_hat.argmax()) == worst.worst_parameter == 2
    assert float(found.ess_bulk.min()) == worst.ess_bulk
    assert parameter_statistics(draws[:, :3]) is None
    assert parameter_statistics(np.zeros_like(draws)) is None


def test_a_histogram_of_equal_values_has_a_width() -> None:
    edges, counts = histogram(np.ones(5), 3)
    assert edges[0] <= 1 < edges[-1]
    assert sum(counts) == 5


@pytest.mark.parametrize("degrees", [1, 2, 4.5, 30, math.inf])
def test_the_factor_is_the_two_sided_quantile_of_student(degrees: float) -> None:
    expected = stats.norm.isf(LEVEL / 2) if math.isinf(degrees) else stats.t.isf(LEVEL / 2, degrees)
    assert quantile(degrees) == pytest.approx(expected, rel=1e-9)


def test_the_factor_is_between_those_of_both_sides_by_their_variances() -> None:
    found = error_factor(Estimate(0.0, 1.0, 3), Estimate(0.0, 2.0, 5))
    assert found == pytest.approx((stats.t.isf(LEVEL / 2, 2) + 4 * stats.t.isf(LEVEL / 2, 4)) / 5)
    assert error_factor(Estimate(0.0, 1.0, 3), Estimate(0.0)) == pytest.approx(stats.t.isf(LEVEL / 2, 2))


def test_what_is_known_exactly_may_differ_by_the_tolerance_alone() -> None:
    assert agreement(Estimate(1.1), Estimate(1.0), 0.11).is_within
    assert not agreement(Estimate(1.1), Estimate(1.0), 0.09).is_within


def test_the_distance_that_is_allowed_grows_with_both_standard_errors() -> None:
    found = agreement(Estimate(1.0, 0.3), Estimate(2.0, 0.4), 0.1)
    assert found.allowed == pytest.approx(0.1 + stats.norm.isf(LEVEL / 2) * 0.5)
    assert found.is_within


def test_the_standard_error_of_a_mean_is_that_of_scipy_and_of_one_value_unknown() -> None:
    values = [1.0, 4.0, 2.5, 0.5]
    found = Estimate.of_repeats(values)
    assert (found.value, found.standard_error, found.count) == (2.0, pytest.approx(stats.sem(values)), 4)
    assert Estimate.of_repeats([3.0]) == Estimate(3.0)


PAIRS = [(3, 5, 1.0), (3, 5, 4.0), (2, 5, 3.0), (10, 5, 0.3), (3, 0, 1.0), (3, 0, 4.0), (0, 5, 1.0), (0, 0, 1.0)]


@pytest.mark.parametrize(("ours", "theirs", "ratio"), PAIRS)
def test_two_estimates_of_one_number_differ_no_more_often_than_the_level(ours: int, theirs: int, ratio: float) -> None:
    """Seeds of both (0: the standard error is known), and the ratio of their standard deviations."""
    generator, trials = np.random.default_rng(0), 4_000
    pairs = ((_drawn(generator, ours, ratio), _drawn(generator, theirs, 1.0)) for _ in range(trials))
    wrong = sum(not agreement(*pair, 0.0).is_within for pair in pairs) / trials
    assert wrong <= LEVEL + 3 * math.sqrt(LEVEL / trials)
    assert wrong >= LEVEL / 10  # nor is it never said


@pytest.mark.parametrize("count", [3, 0])
def test_a_number_that_is_zero_has_a_sign_no_more_often_than_the_level(count: int) -> None:
    generator, trials = np.random.default_rng(1), 10_000
    signs = [sign(_drawn(generator, count, 1.0)) for _ in range(trials)]
    for one in (1, -1):
        assert abs(signs.count(one) / trials - LEVEL / 2) <= 4 * math.sqrt(LEVEL / 2 / trials)


def _drawn(generator: np.random.Generator, count: int, scale: float) -> Estimate:
    """The mean of so many normal numbers about 0 with their standard error."""
    if count == 0:
        return Estimate(scale * generator.standard_normal(), scale)
    values = scale * generator.standard_normal(count)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(count)), count)


@pytest.mark.parametrize("wrong", [(math.nan,), (1.0, -0.1), (1.0, math.inf), (1.0, 0.1, 1)])
def test_an_estimate_is_finite_and_has_several_values_behind_its_error(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected|needs several"):
        Estimate(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "trials"), [(0, 10), (10, 10), (100, 100), (37, 100), (1, 10)])
def test_the_error_of_a_share_reaches_as_far_as_the_exact_interval(count: int, trials: int) -> None:
    found = Estimate.of_share(count / trials, trials)
    exact = stats.binomtest(count, trials).proportion_ci(1 - LEVEL, method="exact")
    reach = max(found.value - exact.low, exact.high - found.value)
    assert found.standard_error == pytest.approx(reach / quantile(math.inf))


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.95])
@pytest.mark.parametrize("trials", [10, 100])
def test_a_share_is_told_from_another_no_more_often_than_the_level(share: float, trials: int) -> None:
    for side in (1, -1):
        signs = [
            sign(Estimate(found.value - share, found.standard_error))
            for found in (Estimate.of_share(count / trials, trials) for count in range(trials + 1))
        ]
        wrong = sum(stats.binom.pmf(count, trials, share) for count, one in enumerate(signs) if one == side)
        assert wrong <= LEVEL / 2


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


SMALL = RankLaw(num_simulations=5, num_draws=3)


def p_values(law: RankLaw, num: int, *, seed: int = 0) -> np.ndarray:
    ranks = np.random.default_rng(seed).integers(0, law.num_draws + 1, size=(num, law.num_simulations))
    return np.array([law.p_value(one) for one in ranks])


def test_the_p_value_is_the_share_of_all_outcomes_that_are_as_odd() -> None:
    every = [np.array(ranks) for ranks in product(range(4), repeat=5)]
    values = np.array([SMALL.p_value(ranks) for ranks in every])
    for value in np.unique(values.round(12)):
        assert value == pytest.approx((values <= value + 1e-9).mean(), abs=1e-9)


def test_ranks_leave_the_bounds_exactly_where_their_p_value_is_at_most_the_level() -> None:
    law, level = RankLaw(40, 19), 0.2
    lowest, highest = law.bounds(level)
    ranks = np.random.default_rng(1).integers(0, 20, size=(200, 40))
    is_out = [bool(((law.counts(one) < lowest) | (law.counts(one) > highest)).any()) for one in ranks]
    assert is_out == [law.p_value(one) <= level for one in ranks]
    assert 0 < sum(is_out) < 200


def test_uniform_ranks_are_doubted_no_more_often_than_the_level_says() -> None:
    values = p_values(RankLaw(30, 9), 1000)
    for level in (0.01, 0.05, 0.2):
        assert (values <= level).mean() < level + 4 * (level * (1 - level) / len(values)) ** 0.5
    assert (values <= 0.2).mean() > 0.15  # and not much less often


@pytest.mark.parametrize("shape", [(2.0, 2.0), (0.6, 0.6), (1.5, 1.0)], ids=["wide", "narrow", "shifted"])
def test_ranks_that_are_off_are_found(shape: tuple[float, float]) -> None:
    ranks = (np.random.default_rng(0).beta(*shape, size=300) * 101).astype(int)
    assert RankLaw(300, 100).p_value(ranks) < 1e-3


@pytest.mark.parametrize("sizes", [(1, 9), (20, 0)], ids=str)
def test_too_few_to_judge_by_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 2 simulations and 1 draw"):
        RankLaw(*sizes)
