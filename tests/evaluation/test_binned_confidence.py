"""Counts of confidences in bins against the curves of all examples; densities and ranks against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bnncli.evaluation.convergence import convergence, parameter_statistics
from bnncli.evaluation.curves import (
    BAND,
    MOST_POINTS,
    bin_confidence,
    block_means,
    density_grid,
    estimate_density,
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
    assert found is not None
    assert (found["edges"], found["count"]) == (expected["edges"], expected["count"])
    for name in ("confidence", "accuracy"):
        np.testing.assert_allclose(np.array(found[name], float), np.array(expected[name], float), rtol=1e-12)


def test_curves_go_through_points_of_those_of_all_examples(many: tuple[np.ndarray, np.ndarray]) -> None:
    inside, outside = bin_confidence(*many), bin_confidence(predictions(5000, 1, 1.0)[0], None)
    confidence, far = many[0].max(axis=1).astype(float), predictions(5000, 1, 1.0)[0].max(axis=1).astype(float)
    roc = inside.roc(outside)
    assert roc is not None
    assert len(roc["fpr"]) <= MOST_POINTS
    for fpr, tpr in zip(roc["fpr"][1:-1], roc["tpr"][1:-1], strict=True):
        threshold = np.sort(far)[::-1][round(fpr * len(far)) - 1] if fpr else 1.0
        assert (confidence > threshold).mean() <= tpr + 1e-6
        assert tpr <= (confidence >= np.sort(far)[::-1][min(round(fpr * len(far)), len(far) - 1)]).mean() + 1e-6
    risk = inside.risk_coverage()
    assert risk is not None
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
    assert found is not None
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
    assert found is not None
    assert float(found.r_hat.max()) == worst.r_hat
    assert int(found.r_hat.argmax()) == worst.worst_parameter == 2
    assert float(found.ess_bulk.min()) == worst.ess_bulk
    assert parameter_statistics(draws[:, :3]) is None
    assert parameter_statistics(np.zeros_like(draws)) is None


def test_a_histogram_of_equal_values_has_a_width() -> None:
    edges, counts = histogram(np.ones(5), 3)
    assert edges[0] <= 1 < edges[-1]
    assert sum(counts) == 5
