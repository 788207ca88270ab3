"""Paired comparisons of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from evaluation.test_calibration import as_good_as, draw
from numpy.typing import NDArray
from problems.score_samples import means, noisy_scores
from scipy import stats

from bnncli.commands.compare import list_paired_scores
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import (
    Sample,
    bootstrap_p_value,
    confidence_set,
    correlation,
    difference,
    holm,
    integration,
    standings,
    t_difference,
)
from bnncli.evaluation.detection import Ranking, auroc, detection_rows
from bnncli.evaluation.scores import ScoredPredictions, detection_forms, split_scores
from bnncli.evaluation.statistics import ExampleStatistics, compute_example_statistics, score_rows
from bnncli.options.scoring import parse_score
from bnncli.session.recommendation import measure_detection, measure_split, select_needed_scores


def test_the_t_test_over_checkpoints_is_that_of_scipy() -> None:
    draws = np.random.default_rng(0).normal(size=(2, 6)) + np.array([[0.0], [0.4]])
    found = difference(Sample(draws[0]), Sample(draws[1]), level=0.9)
    expected = stats.ttest_rel(draws[0], draws[1])
    ends = expected.confidence_interval(0.9)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high), rel=1e-12)
    assert found.standard_error == pytest.approx(stats.sem(draws[0] - draws[1]), rel=1e-12)
    assert Sample(draws[0]).standard_error == pytest.approx(stats.sem(draws[0]), rel=1e-12)


def test_differences_that_do_not_vary_tell_no_p_value_unless_they_are_zero() -> None:
    assert t_difference(np.zeros(3)).p_value == 1
    assert t_difference(np.full(3, 0.25)).p_value is None


def test_replicates_that_do_not_vary_tell_no_p_value_unless_the_scores_are_equal() -> None:
    right, wrong = (Sample(np.full(1, value), np.full(200, value)) for value in (1.0, 0.0))  # each of few examples
    found = difference(right, wrong)
    assert (found.value, found.standard_error, found.low, found.p_value) == (1.0, None, None, None)
    assert difference(right, right).p_value == 1


def test_a_paired_standard_error_is_that_of_the_differences() -> None:
    generator = np.random.default_rng(1)
    shared = generator.normal(size=500)
    columns = np.stack([shared + 0.1 * generator.normal(size=500), shared], axis=1)
    one, other = means(columns, replicates=4000)
    found = difference(one, other)
    expected = np.std(columns[:, 0] - columns[:, 1]) / math.sqrt(500)
    # R replicates tell a standard deviation to 1 / sqrt(2 R) of itself; 5 of those.
    assert found.standard_error == pytest.approx(expected, rel=5 / math.sqrt(2 * 4000))
    assert one.standard_error > 5 * expected


def test_the_bootstrap_p_value_is_near_that_of_a_paired_t_test() -> None:
    generator = np.random.default_rng(2)
    for shift in (0.0, 0.05, 0.1):
        columns = generator.normal(size=(400, 2)) + np.array([shift, 0.0])
        p = difference(*means(columns, replicates=4000)).p_value
        expected = stats.ttest_rel(columns[:, 0], columns[:, 1]).pvalue
        assert p == pytest.approx(expected, abs=5 * math.sqrt(expected / 4000) + 0.01)


def test_the_p_value_is_below_alpha_exactly_where_the_interval_leaves_zero_out() -> None:
    replicates = np.random.default_rng(3).gamma(2.0, size=9999) - 2.0
    for value in np.linspace(-3, 3, 61):
        drawn = value + replicates
        found = difference(Sample(np.array([value]), drawn), Sample(np.zeros(1), np.zeros(9999)), level=0.9)
        is_out = not found.low <= 0 <= found.high
        assert is_out == (found.p_value < 0.1) or found.p_value == pytest.approx(0.1, abs=1e-3)


def test_the_p_value_is_one_for_equal_scores_and_smallest_when_no_replicate_strays_as_far() -> None:
    assert bootstrap_p_value(0.0, np.zeros(99)) == 1
    assert bootstrap_p_value(5.0, 5 + np.linspace(-1, 1, 99)) == 1 / 100
    noise = np.random.default_rng(4).normal(size=(300, 1)) @ np.ones((1, 2))
    assert difference(*means(noise)).p_value == 1


def test_rounding_does_not_tell_a_tie_from_a_difference() -> None:
    steps = np.random.default_rng(5).integers(-3, 4, size=999) * 0.001
    jitter = 1e-12 * np.random.default_rng(6).normal(size=999)
    assert bootstrap_p_value(0.003, 0.003 + steps + jitter) == bootstrap_p_value(0.003, 0.003 + steps)


NUM_WEIGHTS = 20  # sets of resampled weights, each for as many trials
NUM_REPLICATES = 299


def simulate(draw: Any, statistic: Any, trials: int, size: int) -> NDArray:
    """P-values (trials,) of the difference of a statistic of two models, whose true difference is zero."""
    generator = np.random.default_rng(7)
    p_values = []
    for seed in range(NUM_WEIGHTS):
        data = np.stack([draw(generator, size) for _ in range(trials // NUM_WEIGHTS)], axis=1)
        seen = statistic(np.ones((1, size)), data)[0]
        found = Bootstrap(NUM_REPLICATES, seed=seed).replicates(lambda w, d=data: statistic(w, d), ("test", size))
        p_values += [bootstrap_p_value(float(one), drawn) for one, drawn in zip(seen, found.T, strict=True)]
    return np.array(p_values)


def accuracy_gap(weights: NDArray, data: NDArray) -> NDArray:
    """Accuracy of the first model minus that of the second (R, T); data: hits of both in every trial, (2, T, N)."""
    return weights @ (data[0] - data[1]).T / data.shape[2]


def ece_gap(weights: NDArray, data: NDArray) -> NDArray:
    """ECE in 5 bins of the first model minus that of the second (R, T); data: confidences and hits of both, (4, T, N)."""
    errors = []
    for confidence, is_right in (data[:2], data[2:]):
        gaps = np.eye(5)[np.minimum((confidence * 5).astype(int), 4)] * (confidence - is_right)[..., None]  # (T, N, 5)
        columns = gaps.transpose(1, 0, 2).reshape(data.shape[2], -1)
        errors.append(np.abs(weights @ columns).reshape(len(weights), -1, 5).sum(axis=2) / data.shape[2])
    return errors[0] - errors[1]


def draw_hits(generator: np.random.Generator, size: int) -> NDArray:
    """Two models that are right on 80 % each and disagree on a tenth of the examples."""
    draws = generator.random((3, size))
    shared = draws[0] < 0.8
    swapped = draws[1] < 0.25
    return np.stack([shared, np.where(swapped, draws[2] < 0.8, shared)]).astype(float)


def draw_confidences(generator: np.random.Generator, size: int) -> NDArray:
    """Two overconfident models with the same true ECE on labels of their own."""
    confidence = generator.beta(4, 1, size=(2, size))
    is_right = generator.random((2, size)) < confidence - 0.1
    return np.stack([confidence[0], is_right[0], confidence[1], is_right[1]])


@pytest.mark.parametrize(
    ("draw", "statistic"), [(draw_hits, accuracy_gap), (draw_confidences, ece_gap)], ids=["accuracy", "ece"]
)
def test_under_the_null_a_share_alpha_of_the_p_values_is_below_alpha(draw: Any, statistic: Any) -> None:
    trials = 1000
    p_values = simulate(draw, statistic, trials, 300)
    for level in (0.05, 0.2):
        share = float(np.mean(p_values <= level))
        # 3.3 standard errors, of the trials and of the replicates they share: one test in a thousand fails by chance.
        # Discrete scores may be more careful.
        variance = level * (1 - level) * (1 / trials + 1 / (NUM_WEIGHTS * NUM_REPLICATES))
        assert share <= level + 3.3 * math.sqrt(variance)
        assert share >= 0.6 * level


def test_holm_is_the_step_down_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.6]) == [1.0, None, 1.0]
    assert holm([]) == []


def test_holm_rejects_what_the_procedure_in_words_rejects() -> None:
    generator = np.random.default_rng(8)
    for _ in range(200):
        p_values = generator.beta(0.3, 1, size=5)
        rejected = set()
        for rank, place in enumerate(np.argsort(p_values)):
            if p_values[place] > 0.05 / (5 - rank):
                break
            rejected.add(int(place))
        assert {i for i, p in enumerate(holm(list(p_values))) if p is not None and p <= 0.05} == rejected


def test_holm_keeps_the_chance_of_any_false_rejection_at_the_level() -> None:
    draws = np.random.default_rng(9).normal(size=(2000, 5))
    p_values = 2 * stats.norm.sf(np.abs(draws))
    falsely = np.mean([min(p for p in holm(list(row)) if p is not None) <= 0.05 for row in p_values])
    assert falsely == pytest.approx(1 - 0.99**5, abs=3.3 * math.sqrt(0.05 * 0.95 / 2000))


def test_scores_of_other_checkpoints_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same checkpoints, got 2 and 3"):
        difference(Sample(np.zeros(2)), Sample(np.zeros(3)))


def test_integration_errors_of_both_sides_widen_a_difference() -> None:
    one, other = means(np.random.default_rng(12).normal(size=(400, 2)), replicates=4000)
    plain = difference(one, other)
    errors = (0.2, 0.15)
    noisy = [
        Sample(sample.values, sample.replicates, integration(error, 30.0, size=4000, seed=place))
        for place, (sample, error) in enumerate(zip((one, other), errors, strict=True))
    ]
    found = difference(*noisy)
    assert plain.standard_error is not None
    assert found.standard_error == pytest.approx(math.hypot(plain.standard_error, *errors), rel=1e-12)
    assert noisy[0].standard_error == pytest.approx(math.hypot(one.sampling_error or 0, 0.2), rel=1e-12)
    # 30 degrees of freedom are nearly normal; 4,000 draws tell a quantile to about 3 %.
    assert found.high - found.value == pytest.approx(2.0 * found.standard_error, rel=0.1)


def test_the_error_of_few_groups_has_the_tails_of_students_t() -> None:
    one = Sample(np.zeros(1), np.zeros(20_000), integration(1.0, 3.0, size=20_000, seed=1))
    found = difference(one, Sample(np.zeros(1), np.zeros(20_000)))
    assert found.standard_error == pytest.approx(1.0)
    assert found.high == pytest.approx(stats.t.ppf(0.975, 3), rel=0.06)


@pytest.mark.parametrize("degrees", [4])
def test_with_a_baseline_holm_keeps_its_level_where_integration_dominates(degrees: int) -> None:
    """Seven equal posteriors against one, all with integration errors that few groups told."""
    generator, trials = np.random.default_rng(13), 150
    falsely = 0
    for trial in range(trials):
        base, *others = noisy_scores(generator, 8, degrees, trial)
        p_values = holm([difference(other, base).p_value for other in others])
        falsely += min(p for p in p_values if p is not None) <= 0.05
    assert falsely / trials <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("size", [3, 10])
def test_with_a_baseline_the_t_tests_over_checkpoints_keep_their_level(count: int, size: int) -> None:
    generator, trials = np.random.default_rng(14), 500
    falsely = 0
    for _ in range(trials):
        values = (
            generator.normal(size=(1, size)) + generator.normal(size=(count, size)) * np.geomspace(1, 5, count)[:, None]
        )
        p_values = holm([t_difference(own - values[0]).p_value for own in values[1:]])
        falsely += min(p for p in p_values if p is not None) <= 0.05
    assert falsely / trials <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials)


def test_correlations_give_the_standard_error_of_the_difference() -> None:
    generator = np.random.default_rng(3)
    shared = generator.standard_normal(4000)
    own, other = (Sample(np.array([0.0]), shared + 0.3 * generator.standard_normal(4000)) for _ in range(2))
    drawn = Sample(own.values, own.replicates, integration(0.5, 1e9, size=4000, seed=1))
    for one in (own, drawn):
        errors, known = (one.standard_error, other.standard_error), correlation(one, other)
        expected = difference(one, other).standard_error
        assert math.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * known * errors[0] * errors[1]) == pytest.approx(expected)
    assert correlation(own, Sample(np.array([0.0, 1.0]))) is None
    assert correlation(own, Sample(np.array([0.0]), np.zeros(4000))) is None


SIZE = 150


def wanted(*texts: str) -> list:
    return [parse_score(text, "--metric", list_paired_scores()) for text in texts]


def predictions(seed: int, labels: NDArray) -> tuple[NDArray, ExampleStatistics]:
    logits = np.random.default_rng(seed).normal(size=(len(labels), 4)) + 1.5 * np.eye(4)[labels]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probs, compute_example_statistics(probs, labels)


@pytest.fixture
def labels() -> NDArray:
    return np.random.default_rng(0).integers(4, size=SIZE)


def test_scores_and_their_standard_errors_are_those_of_evaluate(labels: NDArray) -> None:
    groups = [split_scores(ScoredPredictions(*predictions(seed, labels))) for seed in (1, 2, 3)]
    resampling = Bootstrap(50, seed=3)
    found = measure_split(
        groups, wanted("nll", "ece:equal-mass", "accuracy", "ece"), split=("test", SIZE), bootstrap=resampling
    )
    assert [one.row["name"] for one in found[0]] == ["nll", "ece", "accuracy", "ece"]
    for own, scores in zip(found, groups, strict=True):
        rows = score_rows(scores, ("test", SIZE), resampling)
        for one in own:
            (row,) = [row for row in rows if row.items() >= one.row.items()]
            assert one.value == pytest.approx(row["value"], rel=1e-12)
            assert one.replicates is not None
            assert np.std(one.replicates, ddof=1) == pytest.approx(row["standard_error"], rel=1e-9)


def test_replicates_are_paired_between_predictions(labels: NDArray) -> None:
    scores = split_scores(ScoredPredictions(*predictions(1, labels)))
    one, same = measure_split([scores, scores], wanted("brier"), split=("test", SIZE), bootstrap=Bootstrap(20))
    np.testing.assert_array_equal(one[0].replicates, same[0].replicates)
    assert one[0].key == same[0].key


def test_differences_below_the_rounding_of_float32_keep_their_digits() -> None:
    generator = np.random.default_rng(4)
    logits, labels = generator.normal(size=(5000, 4)), generator.integers(4, size=5000)
    groups, losses = [], []
    for shift in (0.0, 1e-6):
        shifted = logits + shift * generator.normal(size=logits.shape)
        probs = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        groups.append(split_scores(ScoredPredictions(probs, compute_example_statistics(probs, labels))))
        losses.append(-np.log(probs[np.arange(5000), labels]))
    resampling = Bootstrap(50)
    one, other = measure_split(groups, wanted("nll"), split=("test", 5000), bootstrap=resampling)
    assert one[0].replicates is not None
    counts = np.concatenate([block.astype(float) for (block,) in resampling.weights(("test", 5000))])
    expected = counts @ (losses[0] - losses[1]) / 5000
    assert np.std(expected) < 2e-8
    np.testing.assert_allclose(one[0].replicates - other[0].replicates, expected, rtol=0, atol=1e-12)


def test_an_undefined_score_has_its_reason(labels: NDArray) -> None:
    probs, _ = predictions(1, labels)
    (found,) = measure_split(
        [split_scores(ScoredPredictions(probs, compute_example_statistics(probs)))],
        wanted("nll", "mean_entropy"),
        split=("test", SIZE),
    )
    assert [(one.value is None, one.undefined) for one in found] == [(True, "no labels"), (False, None)]
    assert found[1].replicates is None


def test_detection_is_that_of_evaluate() -> None:
    generator = np.random.default_rng(4)
    pairs = [
        (
            {
                "max_prob": generator.normal(1, 1, size=80),
                "entropy": generator.normal(size=80),
                "energy": "none stored",
            },
            {"max_prob": generator.normal(size=60), "entropy": generator.normal(size=60), "energy": "none stored"},
        )
        for _ in range(2)
    ]
    sizes = {"split": ("test", 80), "ood": ("far", 60)}
    resampling = Bootstrap(40)
    found = measure_detection(pairs, wanted("fpr95", "auroc:entropy", "auroc:energy"), **sizes, bootstrap=resampling)
    for own, (inside, outside) in zip(found, pairs, strict=True):
        rows = detection_rows(inside, outside, detection_forms(), split="test", ood="far", bootstrap=resampling)
        assert [(one.row["name"], one.row["score"], one.row["positive"]) for one in own] == [
            ("fpr95", "max_prob", "in"), ("auroc", "entropy", "in"), ("auroc", "energy", "in"),
        ]  # fmt: skip
        for one in own[:2]:
            (row,) = [row for row in rows if row.items() >= one.row.items()]
            assert one.value == pytest.approx(row["value"], rel=1e-12)
            assert np.std(one.replicates, ddof=1) == pytest.approx(row["standard_error"], rel=1e-9)
        assert (own[2].value, own[2].undefined) == (None, "none stored")


def test_the_scores_that_are_needed_are_those_that_are_asked_for() -> None:
    names = ("max_prob", "entropy", "energy")
    assert select_needed_scores(names, wanted("auroc", "fpr95:far:entropy"), "far") == ["max_prob", "entropy"]
    assert select_needed_scores(names, wanted("auroc:near"), "far") == []


def test_an_empty_split_leaves_detection_undefined() -> None:
    pairs = [({"max_prob": np.zeros(3)}, {"max_prob": np.zeros(0)})]
    ((one,),) = measure_detection(pairs, wanted("auroc"), split=("test", 3), ood=("far", 0), bootstrap=Bootstrap(5))
    assert (one.value, one.undefined) == (None, "only one class is present: split far is empty")


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
        assert (found[1].against.value, found[1].against.p_value) == (pytest.approx(0.1), None)
    assert without[0].standard_error is None


def test_replicates_where_a_score_is_undefined_are_left_out() -> None:
    one, other = means(np.random.default_rng(11).normal(size=(200, 2)) + np.array([0.0, 0.5]))
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
