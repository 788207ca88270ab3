"""Calibration errors, their decomposition and excess."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import scipy.optimize
from numpy.typing import NDArray
from problems.long_run import long_but
from scipy import stats
from scipy.special import softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import brier_score_loss, log_loss

from bnncli.evaluation import calibration, statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import (
    Reliability,
    calibration_scores,
    class_bins,
    class_wise_scores,
    draw_gaps,
    largest_gap,
    reliability,
    shrink_gaps,
)
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
from bnncli.evaluation.statistics import ExampleStatistics, Row, ScoreGroup, compute_example_statistics, score_rows


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
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 60)
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


@pytest.mark.parametrize("scale", long_but([1.5, 2.5], 2.5))
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


FORMS = [("equal-width", "l1"), ("equal-mass", "l1"), ("equal-mass", "l2"), ("published", "l1"), ("class-wise", "l1")]


def world(
    generator: np.random.Generator, count: int, *, temperature: float = 1, shift: float = 0, classes: int = 10
) -> tuple[NDArray, NDArray]:
    """Predictions at a temperature, shifted by class, and labels of the softmax itself (temperature 1, shift 0)."""
    logits = 3 * generator.standard_normal((count, classes))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(0, classes - 1)
    return softmax(logits / temperature + shift * np.linspace(-1, 1, classes), axis=1), labels


def groups_of(probs: NDArray, labels: NDArray) -> list[ScoreGroup]:
    return [*calibration_scores(compute_example_statistics(probs, labels)), class_wise_scores(probs, labels)]


def debiased_rows_of(
    probs: NDArray, labels: NDArray, *, bootstrap: Bootstrap | None = None
) -> dict[tuple[str, str], Row]:
    """The rows of the errors, by strategy and norm; `mce` stands for a norm."""
    rows = score_rows(groups_of(probs, labels), ("test", len(labels)), bootstrap)
    return {(row["strategy"], row.get("norm", row["name"])): row for row in rows}


def plain_errors(probs: NDArray, labels: NDArray) -> dict[tuple[str, str], float]:
    """The errors alone."""
    members = [m for group in groups_of(probs, labels) for m in group.members]
    values = np.concatenate([g.statistic(np.ones((1, len(labels))))[0] for g in groups_of(probs, labels)])  # type: ignore[misc]
    return {(m.choices["strategy"], m.choices.get("norm", m.name)): v for m, v in zip(members, values, strict=True)}


def exact_distribution(probabilities: NDArray) -> NDArray:
    """P(n events) of independent events, by convolution."""
    found = np.ones(1)
    for p in probabilities:
        found = np.convolve(found, [1 - p, p])
    return found


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.05), (0.3, 0.9), (0.97, 1.0)])
def test_draws_of_a_bin_are_distributed_as_events_of_its_probabilities(low: float, high: float) -> None:
    stated = np.random.default_rng(0).uniform(low, high, 40)
    sums = [np.array([v]) for v in (40.0, stated.sum(), (stated**2).sum(), 0.0)]
    gaps = draw_gaps(*sums, generator=np.random.default_rng(1))
    found = np.round(stated.sum() - gaps.calibrated[:, 0]).astype(int)
    pmf = exact_distribution(stated)
    expected = np.arange(41) @ pmf
    assert gaps.calibrated.mean() == pytest.approx(0, abs=4 * np.sqrt((stated * (1 - stated)).sum() / len(found)))
    assert found.var() == pytest.approx((np.arange(41) - expected) ** 2 @ pmf, rel=4 * np.sqrt(2 / len(found)))
    shares = np.bincount(found, minlength=41) / len(found)
    assert np.abs(shares - pmf).max() < 4 * 0.5 / np.sqrt(len(found))


@pytest.mark.parametrize("classes", [2, 6])
def test_the_floor_is_the_mean_error_of_labels_drawn_from_the_predictions(classes: int) -> None:
    generator = np.random.default_rng(2)
    probs, labels = world(generator, 400, temperature=0.7, classes=classes)
    rows, cumulative = debiased_rows_of(probs, labels), probs.cumsum(axis=1)
    drawn: dict[tuple[str, str], list[float]] = {}
    for _ in range(150):
        new = (cumulative < generator.random((400, 1))).sum(axis=1).clip(0, classes - 1)
        for key, value in plain_errors(probs, new).items():
            drawn.setdefault(key, []).append(value)
    for key, values in drawn.items():
        error = np.std(values) * np.sqrt(1 / 150 + 1 / 400)
        assert rows[key]["floor"] == pytest.approx(np.mean(values), abs=4 * error), key
        assert rows[key]["excess"] == pytest.approx(rows[key]["value"] - rows[key]["floor"])


@pytest.mark.parametrize("classes", [2, pytest.param(5, marks=pytest.mark.long)])
def test_the_test_of_calibration_rejects_as_often_as_it_says(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_DRAWS", 250)
    generator, trials = np.random.default_rng(3), 80
    p_values: dict[tuple[str, str], list[float]] = {}
    for _ in range(trials):
        for key, row in debiased_rows_of(*world(generator, 300, classes=classes)).items():
            p_values.setdefault(key, []).append(row["p_calibrated"])
    assert len(p_values) == 7
    for key, values in p_values.items():
        for level in (0.1, 0.3):
            error = np.sqrt(level * (1 - level) / trials)
            assert np.mean(np.array(values) <= level) < level + 3 * error, (key, level)
            if key[1] != "mce":  # whose values are few and far between
                assert np.mean(np.array(values) <= level) > level - 3 * error - 0.03, (key, level)


QUICK = {"classes": 4}
CASES = [{}, {"temperature": 1.15}]
MORE = [{"temperature": 0.5}, {"temperature": 2.0}, {"shift": 1.0}]


@pytest.mark.parametrize("choices", [*CASES, *(pytest.param(one, marks=pytest.mark.long) for one in MORE)], ids=str)
def test_intervals_hold_the_truth_as_often_as_they_say(
    choices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 40 intervals of 90 %: three standard errors below. benchmarks/calibration.py has the long simulation.
    monkeypatch.setattr(calibration, "NUM_DRAWS", 250)
    generator, trials = np.random.default_rng(4), 40
    truth = plain_errors(*world(np.random.default_rng(9), 40_000, **QUICK, **choices))
    hits = dict.fromkeys([*FORMS, ("equal-mass", "mce")], 0)
    for _ in range(trials):
        for group in groups_of(*world(generator, 500, **QUICK, **choices)):
            for member, row in zip(group.members, group.against_chance(generator, 0.9, None), strict=True):
                key = member.choices["strategy"], member.choices.get("norm", member.name)
                error = truth[key] if choices or key[0] == "published" else 0.0
                assert 0 <= row["interval"]["low"] <= row["interval"]["high"] <= 1
                if key in hits:
                    hits[key] += row["interval"]["low"] <= error <= row["interval"]["high"]
    assert min(hits.values()) / trials >= 0.9 - 3 * np.sqrt(0.9 * 0.1 / trials), hits


def test_intervals_are_as_narrow_as_the_noise_where_the_error_is_large() -> None:
    probs, labels = world(np.random.default_rng(5), 4000, temperature=0.4)
    rows = debiased_rows_of(probs, labels, bootstrap=Bootstrap(200))
    for key in FORMS[:3]:
        row = rows[key]
        width = row["interval"]["high"] - row["interval"]["low"]
        assert width == pytest.approx(2 * 1.96 * row["standard_error"], rel=0.25), key
        assert row["interval"]["low"] < row["value"] < row["interval"]["high"]
        assert row["p_calibrated"] < 0.002


def test_zero_is_in_an_interval_exactly_where_the_test_does_not_reject() -> None:
    generator, seen = np.random.default_rng(6), set()
    for trial in range(12):
        rows = debiased_rows_of(*world(generator, 300, temperature=0.85), bootstrap=Bootstrap(2, 0.8, trial))
        for key in FORMS:
            does_reject = rows[key]["p_calibrated"] < 0.1
            assert (rows[key]["interval"]["low"] > 0) == does_reject
            seen.add(does_reject)
    assert seen == {True, False}


def test_a_value_above_its_interval_is_explained() -> None:
    generator, notes = np.random.default_rng(7), 0
    for trial in range(8):
        for row in debiased_rows_of(*world(generator, 200), bootstrap=Bootstrap(2, 0.8, trial)).values():
            assert ("note" in row) == (row["value"] > row["interval"]["high"])
            if "note" in row:
                notes += 1
                assert "it contains the noise floor" in row["note"]
    assert notes > 0


def test_the_gaps_of_two_classes_are_those_of_the_second_alone() -> None:
    probs, labels = world(np.random.default_rng(8), 300, classes=2)
    bins = class_bins(probs, labels, num_bins=15)
    assert (bins.size.sum(), bins.observed.sum()) == (300, labels.sum())
    assert bins.stated.sum() == pytest.approx(probs[:, 1].sum())
    assert class_bins(*world(np.random.default_rng(8), 300, classes=3), num_bins=15).size.sum() == 900


def test_the_interval_of_the_largest_gap_is_that_of_the_least_sure_bin() -> None:
    stated = np.array([0.9, 0.6])
    size, observed = np.array([200.0, 10.0]), np.array([180.0, 3.0])
    found = largest_gap(size, size * stated, size * stated**2, observed, level=0.9)
    ends = [
        stats.binomtest(int(k), int(n)).proportion_ci(0.975, method="exact")
        for k, n in zip(observed, size, strict=True)
    ]
    gaps = [(p - e.high, p - e.low, e.low - p, e.high - p) for p, e in zip(stated, ends, strict=True)]
    assert found["low"] == pytest.approx(max(0, *(max(g[0], g[2]) for g in gaps)))
    assert found["high"] == pytest.approx(max(max(g[1], g[3]) for g in gaps))


def test_predictions_that_leave_no_room_for_chance_have_a_floor_of_zero() -> None:
    probs, labels = np.tile([1.0, 0.0], (60, 1)), np.repeat([0, 1], [50, 10])
    rows = debiased_rows_of(probs, labels, bootstrap=Bootstrap(20))
    row = rows["equal-width", "l1"]
    assert (row["value"], row["floor"], row["p_calibrated"]) == (pytest.approx(1 / 6), 0.0, pytest.approx(1 / 1001))
    assert 0.05 < row["interval"]["low"] < 1 / 6 < row["interval"]["high"] < 0.3
    right = debiased_rows_of(probs, np.zeros(60, dtype=int), bootstrap=Bootstrap(20))["equal-width", "l1"]
    assert (right["value"], right["floor"], right["p_calibrated"]) == (0.0, 0.0, 1.0)
    assert (right["interval"]["low"], right["interval"]["high"]) == (0.0, 0.0)


def test_floors_are_there_without_a_bootstrap_and_repeat_with_the_seed() -> None:
    probs, labels = world(np.random.default_rng(1), 200)
    plain, again, other = (debiased_rows_of(probs, labels, bootstrap=b) for b in (None, None, Bootstrap(2, seed=5)))
    assert plain == again
    assert all("interval" not in row and 0 < row["floor"] < 1 for row in plain.values())
    assert plain["equal-width", "l1"]["floor"] != other["equal-width", "l1"]["floor"]


def test_many_bins_get_fewer_draws() -> None:
    for num_bins, num_draws in ((500, 200), (100, 655)):
        bins = [np.full(num_bins, value) for value in (4.0, 2.0, 1.0, 1.0)]
        assert len(draw_gaps(*bins, generator=np.random.default_rng(0)).noise) == num_draws


def test_gaps_are_shrunk_towards_zero_and_not_beyond() -> None:
    assert shrink_gaps(np.array([0.3, -0.3, 0.1]), np.array([0.2, 0.1, 0.2])) == pytest.approx([0.1, -0.2, 0.0])
