"""Calibration errors, their decomposition and excess."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import scipy.optimize
from numpy.typing import NDArray
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import brier_score_loss, log_loss

from bnncli.evaluation import statistics as probabilities
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import Reliability, calibration_scores, class_wise_scores, reliability
from bnncli.evaluation.class_scores import decomposition_scores
from bnncli.evaluation.recommendation import (
    FALSE_ALARM,
    WORSE_SHARE,
    RelabelledDifferences,
    ScoredPredictive,
    compare_losses,
    loss_interval,
    mean_interval,
    p_value,
    score_predictive,
)
from bnncli.evaluation.statistics import ExampleStatistics, Row, compute_example_statistics, score_rows


def rows_of(probs: NDArray, labels: NDArray, *, num_bins: int = 15, bootstrap: Bootstrap | None = None) -> list[Row]:
    scores = [*calibration_scores(compute_example_statistics(probs, labels), num_bins=num_bins)]
    scores.append(class_wise_scores(probs, labels, num_bins=num_bins))
    return score_rows(scores, ("test", len(labels)), bootstrap)


def value(
    probs: NDArray, labels: NDArray, name: str, strategy: str = "equal-width", *, norm: str = "l1", num_bins: int = 15
) -> float:
    """The calibration error of this name and form."""
    groups = calibration_scores(compute_example_statistics(probs, labels), num_bins=num_bins)
    for group in [*groups, class_wise_scores(probs, labels, num_bins=num_bins)]:
        for place, member in enumerate(group.members):
            if (member.name, member.choices["strategy"], member.choices.get("norm", norm)) == (name, strategy, norm):
                assert group.statistic is not None
                return float(group.statistic(np.ones((1, len(labels))))[0, place])
    raise AssertionError(name)


def ece(probs: NDArray, labels: NDArray, *, num_bins: int = 15) -> float:
    return value(probs, labels, "ece", num_bins=num_bins)


def mce(probs: NDArray, labels: NDArray, *, num_bins: int = 15) -> float:
    return value(probs, labels, "mce", num_bins=num_bins)


def bins_of(probs: NDArray, labels: NDArray, **settings: object) -> Reliability:
    return reliability(compute_example_statistics(probs, labels), **settings)


def with_confidence(confidence: NDArray) -> ExampleStatistics:
    """Examples that are all right, with these confidences."""
    nothing = np.zeros(len(confidence))
    whole = np.zeros(len(confidence), dtype=int)
    return ExampleStatistics(2, confidence, whole, nothing, nothing, whole, whole == 0, confidence, whole)


def predictions(num_classes: int, *, count: int = 400, seed: int = 0) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.full(num_classes, 0.4), size=count).astype(np.float32)
    return probs, generator.integers(num_classes, size=count)


def binary(confidence: float, num_right: int, num_wrong: int) -> tuple[NDArray, NDArray]:
    """Predictions of class 0 with one confidence, some of them right."""
    probs = np.tile([confidence, 1 - confidence], (num_right + num_wrong, 1))
    return probs, np.repeat([0, 1], [num_right, num_wrong])


def errors_by_loop(probs: NDArray, labels: NDArray, num_bins: int) -> tuple[float, float]:
    """ECE and MCE, one bin and one example at a time."""
    gaps, weights = [], []
    for b in range(num_bins):
        members = []
        for row, label in zip(probs.astype(float), labels, strict=True):
            above = row.max() > b / num_bins or b == 0
            below = row.max() <= (b + 1) / num_bins or b == num_bins - 1
            if above and below:
                members.append((row.max(), float(row.argmax() == label)))
        if members:
            confidence, right = np.mean(members, axis=0)
            gaps.append(abs(confidence - right))
            weights.append(len(members) / len(labels))
    assert sum(weights) == pytest.approx(1)
    return float(np.dot(gaps, weights)), max(gaps)


@pytest.mark.parametrize("num_bins", [1, 10, 15])
@pytest.mark.parametrize("num_classes", [2, 6])
def test_ece_and_mce_are_those_of_the_loop(num_classes: int, num_bins: int) -> None:
    probs, labels = predictions(num_classes)
    probs[:20] = np.eye(num_classes)[np.arange(20) % num_classes]  # confidence exactly 1
    probs[20:30] = 1 / num_classes  # ties between all classes
    expected = errors_by_loop(probs, labels, num_bins)
    measured = ece(probs, labels, num_bins=num_bins), mce(probs, labels, num_bins=num_bins)
    assert measured == pytest.approx(expected, rel=1e-10)


def test_empty_bins_have_no_confidence_and_no_gap() -> None:
    bins = bins_of(*binary(0.9, 6, 4))
    assert bins.count.tolist() == [0] * 13 + [10] + [0]
    assert np.isnan(bins.confidence[:13]).all()
    assert np.isnan(bins.accuracy[14])
    assert (bins.confidence[13], bins.accuracy[13]) == pytest.approx((0.9, 0.6))


def test_the_error_of_calibrated_predictions_vanishes_with_their_number() -> None:
    generator = np.random.default_rng(0)
    count = 400_000
    probs = generator.dirichlet(np.ones(3), size=count)
    labels = (probs.cumsum(axis=1) < generator.random((count, 1))).sum(axis=1)
    bins = bins_of(probs, labels)
    # The gap of a bin of n examples is about normal with standard deviation at most 1 / (2 sqrt n).
    bound = np.sum(bins.count / count * 0.5 / np.sqrt(np.maximum(bins.count, 1)))
    assert ece(probs, labels) < bound
    assert ece(probs[:400], labels[:400]) > ece(probs, labels)


def test_no_form_depends_on_the_order_of_examples() -> None:
    probs, labels = predictions(4)
    probs[:100] = probs[0]  # ties at an edge of equal mass
    order = np.random.default_rng(1).permutation(len(labels))
    for row, other in zip(rows_of(probs, labels), rows_of(probs[order], labels[order]), strict=True):
        assert row["value"] == pytest.approx(other["value"], rel=1e-9)


@pytest.mark.parametrize("count", [400, 397, 7])
def test_bins_of_equal_mass_are_the_pieces_of_the_sorted_confidences(count: int) -> None:
    probs, labels = predictions(6, count=count)
    confidence, is_right = probs.max(axis=1).astype(float), probs.argmax(axis=1) == labels
    order = np.argsort(confidence)
    ends = [-(-count * b // 10) for b in range(11)]  # rounded up
    pieces = [order[begin:end] for begin, end in itertools.pairwise(ends) if end > begin]
    gaps = [abs(confidence[piece].mean() - is_right[piece].mean()) for piece in pieces]
    expected = sum(len(piece) * gap for piece, gap in zip(pieces, gaps, strict=True)) / count
    assert value(probs, labels, "ece", "equal-mass", num_bins=10) == pytest.approx(expected, rel=1e-10)
    assert value(probs, labels, "mce", "equal-mass", num_bins=10) == pytest.approx(max(gaps), rel=1e-10)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_equal_confidences_share_a_bin_of_equal_mass() -> None:
    bins = reliability(with_confidence(np.repeat([0.6, 0.7, 1.0], [50, 2, 8])), num_bins=4, strategy="equal-mass")
    assert bins.count.tolist() == [50, 0, 0, 10]
    assert bins.edges.tolist() == [0, 0.6, 0.6, 0.6, 1]


def test_the_debiased_error_is_the_loop_over_bins() -> None:
    probs, labels = predictions(5, count=200)
    probs = probs[probs.argmax(axis=1) != labels]  # far from calibrated, so that nothing is cut off
    labels = (probs.argmax(axis=1) + (np.arange(len(probs)) % 3 > 0)) % 5
    confidence, is_right = probs.max(axis=1).astype(float), probs.argmax(axis=1) == labels
    order, total = np.argsort(confidence), 0.0
    ends = [-(-len(order) * b // 8) for b in range(9)]
    for begin, end in itertools.pairwise(ends):
        members, size = order[begin:end], end - begin
        accuracy = is_right[members].mean()
        noise = np.var(is_right[members], ddof=1) / size  # of a mean
        total += size / len(order) * ((confidence[members].mean() - accuracy) ** 2 - noise)
    assert total > 0
    assert value(probs, labels, "ece", "equal-mass", norm="l2", num_bins=8) == pytest.approx(total**0.5, rel=1e-9)


def test_the_debiased_error_of_bins_of_one_example_is_undefined() -> None:
    probs, labels = predictions(3, count=15)
    (row,) = [row for row in rows_of(probs, labels, bootstrap=Bootstrap(20)) if row.get("estimator") == "debiased"]
    assert (row["value"], row["undefined"]) == (None, "no bin holds two examples, so the noise cannot be estimated")
    assert value(probs, labels, "ece", "equal-mass", norm="l2", num_bins=14) >= 0


def published_by_loop(probs: NDArray, labels: NDArray) -> float:
    """As the published script counts: bins 0 to 99 of np.digitize, weights that sum to one over those."""
    confidence, is_right = probs.max(axis=1).astype(float), probs.argmax(axis=1) == labels
    digits = np.digitize(confidence, np.linspace(0, 1, 101))
    gaps, sizes = [], []
    for b in range(100):
        if (digits == b).any():
            gaps.append(abs(confidence[digits == b].mean() - is_right[digits == b].mean()))
            sizes.append((digits == b).sum())
    return float(np.dot(gaps, sizes) / np.sum(sizes))


def test_the_published_error_leaves_out_the_top_bin() -> None:
    probs, labels = predictions(3)
    probs[:50] = [1, 0, 0]
    rows = [row for row in rows_of(probs, labels) if row["strategy"] == "published"]
    assert [row["num_used"] for row in rows] == [int((probs.max(axis=1) < 0.99).sum())]
    assert rows[0]["value"] == pytest.approx(published_by_loop(probs, labels), rel=1e-10)


def test_the_published_error_of_sure_predictions_is_undefined() -> None:
    probs, labels = binary(0.995, 50, 50)
    (row,) = [row for row in rows_of(probs, labels, bootstrap=Bootstrap(20)) if row["strategy"] == "published"]
    assert row["value"] is None
    assert "0.99 or more" in row["undefined"]
    assert "interval" not in row


def test_a_calibrated_and_confident_model_has_the_published_error_of_the_analysis() -> None:
    # maths: 80 % of the confidences above 0.99 and all calibrated; the rest is scored as if it were everything.
    generator = np.random.default_rng(0)
    confidence = np.where(generator.random(10_000) < 0.8, 0.995, generator.uniform(0.5, 0.99, 10_000))
    probs = np.column_stack([confidence, 1 - confidence])
    labels = (generator.random(10_000) > confidence).astype(int)
    assert value(probs, labels, "ece") < 0.02
    assert value(probs, labels, "ece", "published") > 0.04


@pytest.mark.parametrize("num_classes", [2, 5])
def test_the_class_wise_error_is_the_loop_over_classes(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    probs[:10] = np.eye(num_classes)[0]
    total = 0.0
    for k in range(num_classes):
        for b in range(15):
            members = [
                (float(row[k]), float(label == k))
                for row, label in zip(probs, labels, strict=True)
                if (row[k] > b / 15 or b == 0) and (row[k] <= (b + 1) / 15 or b == 14)
            ]
            total += abs(sum(p - y for p, y in members)) / len(labels) / num_classes
    assert value(probs, labels, "ece", "class-wise") == pytest.approx(total, rel=1e-6)


def test_the_class_wise_error_needs_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = predictions(5)
    whole = value(probs, labels, "ece", "class-wise")
    monkeypatch.setattr(probabilities, "BLOCK_VALUES", 60)
    assert value(probs, labels, "ece", "class-wise") == pytest.approx(whole, rel=1e-12)


def test_replicates_are_the_errors_of_repeated_examples() -> None:
    probs, labels = predictions(4, count=300)
    scores = [*calibration_scores(compute_example_statistics(probs, labels)), class_wise_scores(probs, labels)]
    (weights,) = next(Bootstrap(3).weights(("test", 300)))
    repeated = np.repeat(np.arange(300), weights[1].astype(int))
    for row, other in zip(
        [float(v) for group in scores for v in group.statistic(weights)[1]],
        rows_of(probs[repeated], labels[repeated]),
        strict=True,
    ):
        if other["strategy"] != "equal-mass":  # whose edges stay those of the sample
            assert row == pytest.approx(other["value"], rel=1e-5)


def forecasts(count: int = 400) -> tuple[NDArray, NDArray]:
    """Probabilities of class 1, with ties, that are overconfident, and labels."""
    generator = np.random.default_rng(0)
    forecast = generator.beta(0.6, 0.6, count).round(2)
    return forecast, (generator.random(count) < 0.2 + 0.6 * forecast).astype(int)


def parts(forecast: NDArray, labels: NDArray, weights: NDArray | None = None) -> NDArray:
    """Rows of miscalibration, discrimination and uncertainty: of the Brier score, of the NLL."""
    probs = np.column_stack([1 - forecast, forecast]).astype(np.float32)
    statistic = decomposition_scores(compute_example_statistics(probs, labels)).statistic
    assert statistic is not None
    return statistic(np.ones((1, len(labels))) if weights is None else weights).reshape(-1, 2, 3)


def test_the_recalibrated_score_is_that_of_scikit_learn() -> None:
    forecast, labels = forecasts()
    fitted = IsotonicRegression(y_min=0, y_max=1).fit_transform(forecast, labels)
    _, discrimination, uncertainty = parts(forecast, labels)[0].T
    expected = [2 * brier_score_loss(labels, fitted), log_loss(labels, fitted)]
    assert uncertainty - discrimination == pytest.approx(expected, rel=1e-9)


def test_the_parts_add_up_to_the_score() -> None:
    forecast, labels = forecasts()
    forecast = forecast.clip(0.01, 0.99)
    miscalibration, discrimination, uncertainty = parts(forecast, labels)[0].T
    expected = [2 * brier_score_loss(labels, forecast), log_loss(labels, forecast)]
    assert miscalibration - discrimination + uncertainty == pytest.approx(expected, rel=1e-5)
    assert min(miscalibration) > 0.01


def test_equal_forecasts_do_not_differ_by_their_label() -> None:
    # Float32: 1 - p rounds to 1 for one label and p stays 1e-9 for the other.
    probs = np.tile(np.array([1, 1e-9], dtype=np.float32), (40, 1))
    statistic = decomposition_scores(compute_example_statistics(probs, np.repeat([0, 1], [30, 10]))).statistic
    assert statistic is not None
    assert statistic(np.ones((1, 40)))[0, [1, 4]] == pytest.approx([0, 0], abs=1e-12)


def test_weights_count_as_repeated_examples() -> None:
    forecast, labels = forecasts(150)
    (weights,) = next(Bootstrap(4).weights(("test", 150)))
    for row, measured in zip(weights.astype(int), parts(forecast, labels, weights), strict=True):
        again = np.repeat(np.arange(150), row)
        assert parts(forecast[again], labels[again])[0] == pytest.approx(measured, rel=1e-9)


def test_labels_of_one_class_have_no_uncertainty() -> None:
    found = parts(np.linspace(0.1, 0.9, 9), np.ones(9, dtype=int))[0]
    assert found[:, 1:] == pytest.approx(np.zeros((2, 2)), abs=1e-12)


def test_more_classes_have_no_decomposition() -> None:
    scores = decomposition_scores(compute_example_statistics(np.full((4, 3), 1 / 3), np.zeros(4, dtype=int)))
    assert (scores.statistic, scores.undefined) == (None, "expected two classes, got 3")


SPREAD = 6.0  # of the true logit: most labels are nearly certain, as those of a good network


def sigmoid(logit: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-logit))


def losses(logit: NDArray, labels: NDArray) -> NDArray:
    return np.logaddexp(0, np.where(labels, -logit, logit))


def risk(scale: float, grid: NDArray) -> float:
    """The true NLL of a network whose logits are `scale` times the true ones."""
    truth = sigmoid(grid)
    return float(np.mean(truth * losses(scale * grid, np.ones(1)) + (1 - truth) * losses(scale * grid, np.zeros(1))))


@cache
def as_good_as(scale: float) -> float:
    """The hedging scale, below 1, whose true NLL is that of an overconfident one: the null holds exactly."""
    grid = SPREAD * stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    return scipy.optimize.brentq(lambda other: risk(other, grid) - risk(scale, grid), 1e-3, 1.0)


def draw(size: int, trials: int, *scales: float) -> list[NDArray]:
    """Losses (trials, size) of each scale on the same labels."""
    generator = np.random.default_rng(0)
    truth = SPREAD * generator.normal(size=(trials, size))
    labels = generator.random((trials, size)) < sigmoid(truth)
    return [losses(scale * truth, labels) for scale in scales]


def alarms(chosen: NDArray, *references: NDArray) -> float:
    """The share of trials with any p-value, after Holm's correction, at the level; no least excess asked for."""
    count = 0
    for trial, row in enumerate(chosen):
        others = [ScoredPredictive(str(place), reference[trial]) for place, reference in enumerate(references)]
        found = compare_losses(ScoredPredictive("chosen", row), others)
        count += any(one.p_adjusted is not None and one.p_adjusted <= FALSE_ALARM for one in found)
    return count / len(chosen)


def tolerated(trials: int) -> float:
    """3.3 binomial standard errors: one test in a thousand fails by chance."""
    return 3.3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / trials)


@pytest.mark.parametrize("scale", [1.5, 2.5])
@pytest.mark.parametrize("is_hedged", [True, False], ids=["hedged against sure", "sure against hedged"])
def test_predictives_that_are_equally_good_alarm_no_oftener_than_stated(scale: float, is_hedged: bool) -> None:
    sure, hedged = draw(300, 1500, scale, as_good_as(scale))
    share = alarms(*((hedged, sure) if is_hedged else (sure, hedged)))
    assert share <= FALSE_ALARM + tolerated(1500)
    assert share >= 0.2 * FALSE_ALARM  # it is a test, and not silence


@pytest.mark.parametrize("size", [30, 100])
@pytest.mark.parametrize("kind", ["mixed", "sure", "very sure"])
def test_samples_that_lack_the_large_losses_prove_nothing(size: int, kind: str) -> None:
    """Two predictives that are equally good at every example, most of them sure: Hall's test alone alarms in up to 59 of 100."""
    generator, trials = np.random.default_rng(5), 600
    uniform = generator.random((trials, size))
    confidence = {"mixed": 0.5 + uniform / 2, "sure": 0.5 + uniform ** (1 / 20) / 2, "very sure": 1 - uniform**6 / 2}[
        kind
    ]
    logit = np.log(confidence) - np.log(np.maximum(1 - confidence, 1e-12))
    sure, hedged = sigmoid(1.7 * logit), sigmoid(0.7 * logit)
    right, wrong = np.log(sure / hedged), np.log(np.maximum(1 - sure, 1e-15) / (1 - hedged))
    truth = np.where(right - wrong > 1e-9, wrong / np.minimum(wrong - right, -1e-9), 0.5)
    labels = generator.random((trials, size)) < truth
    chosen, reference = losses(0.7 * logit, labels), losses(1.7 * logit, labels)
    alone = np.mean([(p_value(gap) or 0) <= FALSE_ALARM for gap in chosen - reference])
    assert alarms(chosen, reference) <= FALSE_ALARM + tolerated(trials)
    if (size, kind) in ((30, "sure"), (100, "sure"), (30, "very sure")):
        assert alone > 0.1


def test_students_t_would_not_keep_the_level() -> None:
    sure, hedged = draw(300, 2000, 2.5, as_good_as(2.5))
    gaps = hedged - sure
    statistic = math.sqrt(300) * gaps.mean(axis=1) / gaps.std(axis=1, ddof=1)
    assert np.mean(stats.t.sf(statistic, 299) <= FALSE_ALARM) > FALSE_ALARM + tolerated(2000)


def test_three_references_that_are_as_good_alarm_no_oftener_than_stated() -> None:
    scales = (1.5, as_good_as(1.5))
    sure, hedged = draw(300, 800, *scales)
    noise = np.random.default_rng(1).normal(size=(2, *sure.shape))
    share = alarms(hedged, sure, hedged + 0.1 * noise[0], hedged + 0.1 * noise[1])
    assert share <= FALSE_ALARM + tolerated(800)


def test_a_predictive_that_is_much_worse_is_found() -> None:
    sure, worse = draw(300, 200, 1.0, 0.3)
    assert alarms(worse, sure) > 0.95


def test_the_p_value_is_halls_statistic_by_hand() -> None:
    values = np.array([0.0, 0.0, 0.0, 1.0])
    # mean 1/4, standard deviation 1/2, central moments 3/16 and 3/32: skewness 2 / sqrt(3)
    skewness, ratio = 2 / math.sqrt(3), 0.5
    corrected = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / 24
    assert p_value(values) == pytest.approx(stats.t.sf(2 * corrected, 3), rel=1e-12)
    assert p_value(1e-120 * values) == pytest.approx(p_value(values), rel=1e-12)


def test_relabelled_differences_have_mean_zero_and_their_tail_is_exact_or_bounded() -> None:
    own, other = np.array([0.1, 0.5, 2.0]), np.array([0.05, 0.9, 2.0])
    found = RelabelledDifferences.of(own, other)
    assert len(found.seen) == 2  # the third is the same
    q, p = np.exp(-own[:2]), np.exp(-other[:2])
    np.testing.assert_allclose(found.seen, np.log(p / q))
    np.testing.assert_allclose(found.unseen, np.log((1 - p) / (1 - q)))
    np.testing.assert_allclose(found.share * found.seen + (1 - found.share) * found.unseen, 0, atol=1e-12)
    four = {
        found.share[0] ** a * (1 - found.share[0]) ** (1 - a) * found.share[1] ** b * (1 - found.share[1]) ** (1 - b):
        (found.seen[0] if a else found.unseen[0]) + (found.seen[1] if b else found.unseen[1])
        for a in (0, 1) for b in (0, 1)
    }  # fmt: skip
    for total in four.values():
        exact = sum(chance for chance, value in four.items() if value >= total - 1e-12)
        assert found.p_value(total) == pytest.approx(exact, abs=0.04)
    many = RelabelledDifferences.of(np.tile(own, 200), np.tile(own - 0.05, 200))
    largest, least = float(many.seen.sum()), math.exp(float(np.log(many.share).sum()))
    assert least <= many.p_value(largest) <= least**0.9  # the observed label everywhere, and no other way
    sd = math.sqrt(-(many.seen * many.unseen).sum())
    assert 1e-9 < many.p_value(4 * sd) < 10 * stats.norm.sf(4)  # large differences are of the other sign: a light tail
    opposite = many.opposite()
    assert opposite.p_value(-4 * sd) > 0.99
    np.testing.assert_allclose(
        RelabelledDifferences.of(np.tile(own - 0.05, 200), np.tile(own, 200)).sums, opposite.sums
    )


def test_without_skewness_it_is_students_t() -> None:
    values = np.array([-1.0, 0.5, 1.0, 1.5, 3.0])
    assert stats.skew(values) == 0
    assert p_value(values) == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue, rel=1e-12)


def test_what_does_not_vary_tells_no_p_value_unless_it_is_zero() -> None:
    assert p_value(np.zeros(5)) == 1
    assert p_value(np.full(5, 0.3)) is None
    assert p_value(np.array([0.3])) is None


def test_a_loss_too_small_to_matter_is_no_alarm_however_sure_it_is() -> None:
    base = np.random.default_rng(2).exponential(size=1000)
    reference = ScoredPredictive("network", base)
    noise = 1e-4 * np.random.default_rng(3).normal(size=1000)
    below, above = (
        ScoredPredictive("laplace", base + share * WORSE_SHARE * reference.nll + noise) for share in (0.9, 1.1)
    )
    small, large = (compare_losses(one, [reference])[0] for one in (below, above))
    assert small.p_adjusted is not None
    assert small.p_adjusted < 1e-3
    assert (small.is_worse, large.is_worse) == (False, True)
    assert large.value == pytest.approx(1.1 * WORSE_SHARE * reference.nll, rel=1e-2)
    assert large.standard_error == pytest.approx(noise.std(ddof=1) / math.sqrt(1000))


def test_a_scored_predictive_has_the_nll_and_the_ece_by_hand() -> None:
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
    found = score_predictive("network", probs, np.array([0, 1, 1, 1]))
    assert found.nll == pytest.approx(-np.mean(np.log([0.9, 0.1, 0.6, 0.7])))
    assert found.ece == pytest.approx((2 * 0.4 + 0.4 + 0.3) / 4)  # bins (0.87, 0.93], (0.53, 0.6], (0.67, 0.73]
    assert found.standard_error == pytest.approx(np.std(-np.log([0.9, 0.1, 0.6, 0.7]), ddof=1) / 2)
    held_out = np.ones(4)
    assert score_predictive("temperature", probs, np.array([0, 1, 1, 1]), losses=held_out).nll == 1.0


def test_a_bound_beyond_all_numbers_says_nothing() -> None:
    rare = RelabelledDifferences(np.array([100.0]), np.array([-1e-6]), np.array([1e-8]), np.zeros(10))
    assert rare.p_value(50.0) == 1 / 11  # that of the draws


def test_the_interval_of_two_skewed_losses_holds_their_equality() -> None:
    scale = 4.0
    pairs = list(zip(*draw(100, 400, scale, as_good_as(scale)), strict=True))
    ends = [loss_interval(sure, hedging) for sure, hedging in pairs]
    missed = np.mean([low > 0 or high < 0 for low, high in ends])  # type: ignore[misc]
    assert missed <= 0.05 + tolerated(400)
    alone = [mean_interval(sure - hedging) for sure, hedging in pairs]
    assert np.mean([low > 0 or high < 0 for low, high in alone]) > missed  # type: ignore[misc]
