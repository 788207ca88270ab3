"""Rules of decision: acceptance, levels, outliers, prediction sets and shift."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special, stats

from bnncli.evaluation import decisions
from bnncli.evaluation.decisions import (
    NUM_CLASS_SHARES,
    SMALLEST_P,
    CostRule,
    SetRule,
    SetScore,
    ShiftRule,
    choose_regularisation,
    class_thresholds,
    covering_rank,
    distance_p_value,
    doubts,
    excluding_rank,
    fit_acceptance,
    fit_outliers,
    fit_precision,
    fit_recall,
    fit_thresholds,
    fit_weighted_threshold,
    kolmogorov_smirnov_distance,
    label_ranks,
    mean_interval,
    min_accepted,
    min_scores_for_coverage,
    min_scores_for_rate,
    pool_rare_classes,
    set_scores,
)
from bnncli.evaluation.density_ratio import effective_size, estimate_ratio

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
    least = min_scores_for_coverage(level, confidence)
    assert covering_rank(least, level, confidence) is not None
    assert covering_rank(least - 1, level, confidence) is None
    least = min_scores_for_rate(round(1 - level, 2), confidence)
    assert excluding_rank(least, round(1 - level, 2), confidence) is not None
    assert excluding_rank(least - 1, round(1 - level, 2), confidence) is None


REPEATS = 400


def drawn(generator: np.random.Generator, count: int, kind: str) -> tuple[NDArray, NDArray]:
    """Confidences and whether the prediction is right: by what it says, by half of that, or alike everywhere and just too seldom."""
    doubt = np.clip(10.0 ** -generator.gamma(2.0, 0.8, size=count), 1e-7, 0.9)
    wrong = {"calibrated": doubt, "overconfident": np.minimum(1, 2 * doubt), "flat": np.full(count, 0.0205)}
    return 1 - doubt, generator.random(count) >= wrong[kind]


def true_risks(kind: str) -> NDArray:
    """The share of wrong ones among what each threshold accepts, of a million examples."""
    if kind == "flat":
        return np.full(len(doubts()), 0.0205)
    confidence, is_right = drawn(np.random.default_rng(99), 1_000_000, kind)
    doubt = 1 - confidence
    accepted = np.searchsorted(np.sort(doubt), doubts(), side="right")
    return np.searchsorted(np.sort(doubt[~is_right]), doubts(), side="right") / np.maximum(accepted, 1)


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "flat"])
@pytest.mark.parametrize("certainty", [0.95, 0.8])
def test_the_risk_is_exceeded_no_more_often_than_is_said(kind: str, certainty: float) -> None:
    generator, risks = np.random.default_rng(4), dict(zip(doubts().tolist(), true_risks(kind), strict=True))
    exceeded = 0
    for _ in range(REPEATS):
        rule = fit_acceptance(*drawn(generator, 1500, kind), 0.02, certainty)
        exceeded += rule.most_doubt is not None and risks[rule.most_doubt] > 0.02
    allowed = 1 - certainty
    assert exceeded / REPEATS <= allowed + 3 * (allowed * (1 - allowed) / REPEATS) ** 0.5


def test_more_is_accepted_than_where_every_threshold_has_the_same_level() -> None:
    """Handing levels on is what the procedure is for."""
    generator, handed, alone = np.random.default_rng(5), [], []
    for _ in range(50):
        confidence, is_right = drawn(generator, 2000, "calibrated")
        rule = fit_acceptance(confidence, is_right, 0.05, 0.95)
        handed.append(rule.accepts(confidence).mean())
        doubt = 1 - confidence
        accepted = np.array([(doubt <= most).sum() for most in doubts()])
        errors = np.array([((doubt <= most) & ~is_right).sum() for most in doubts()])
        passed = np.flatnonzero(stats.binom.cdf(errors, accepted, 0.05) <= 0.05 / len(doubts()))
        alone.append(accepted[passed[-1]] / 2000)
    assert np.mean(handed) > np.mean(alone) + 0.02


def test_the_test_is_the_exact_binomial_one() -> None:
    confidence, is_right = drawn(np.random.default_rng(6), 3000, "calibrated")
    rule = fit_acceptance(confidence, is_right, 0.05, 0.9)
    accepted = rule.accepts(confidence)
    assert rule.num_accepted == accepted.sum()
    assert rule.num_wrong == (~is_right[accepted]).sum()
    assert rule.p_value == pytest.approx(stats.binom.cdf(rule.num_wrong, rule.num_accepted, 0.05), rel=1e-9)
    assert rule.p_value <= rule.level <= 0.1


def test_what_cannot_be_shown_accepts_nothing() -> None:
    confidence = np.linspace(0.5, 1, 500)
    rule = fit_acceptance(confidence, np.arange(500) % 3 > 0, 0.02, 0.95)
    assert rule.most_doubt is None
    assert not rule.accepts(confidence).any()


def test_the_least_number_is_the_first_that_can_show_it() -> None:
    least = min_accepted(0.02, 0.95)
    accepted = [fit_acceptance(np.ones(count), np.ones(count), 0.02, 0.95).most_doubt for count in (least - 1, least)]
    assert accepted[0] is None or accepted[0] < 1  # levels are handed on from stricter thresholds
    assert accepted[1] == 1.0


def test_classes_with_few_examples_share_the_threshold_of_their_pool() -> None:
    assert pool_rare_classes(np.array([50, 3, 20, 0, 30]), 9) == [1, 2, 3]  # 3 + 0 are too few, so 20 join them
    assert pool_rare_classes(np.array([50, 9, 20]), 9) == []
    generator = np.random.default_rng(10)
    scores, labels = generator.random(200), generator.choice(3, size=200, p=[0.8, 0.1, 0.1])
    found = fit_thresholds(scores, labels, 0.9, num_classes=3, pooled=[1, 2])
    pool = np.sort(scores[labels > 0])
    assert found[1] == found[2] == pool[covering_rank(len(pool), 0.9) - 1]  # type: ignore[operator]
    assert found[0] == fit_thresholds(scores[labels == 0], None, 0.9, num_classes=3)[0]


def test_a_pool_of_rare_classes_has_the_coverage_together() -> None:
    """The classes are about as frequent as decides who is in the pool, and their scores differ."""
    generator, shares, scale = np.random.default_rng(11), np.array([0.7, 0.15, 0.1, 0.05]), np.array([1, 2, 3, 4])
    found, repeats = [], 2000
    for _ in range(repeats):
        labels = generator.choice(4, size=120, p=shares)
        pooled = pool_rare_classes(np.bincount(labels, minlength=4), 9)
        thresholds = fit_thresholds(scale[labels] * generator.random(120), labels, 0.9, num_classes=4, pooled=pooled)
        coverage, own = np.minimum(1, thresholds / scale), pooled or [3]
        found.append(float(shares[own] @ coverage[own] / shares[own].sum()))
    assert np.mean(found) >= 0.9 - 3 * np.std(found) / repeats**0.5


@pytest.mark.parametrize("is_known", [True, False])
def test_weighted_sets_have_the_coverage_where_the_inputs_have_shifted(is_known: bool) -> None:
    """Inputs move from N(0, 1) to N(1, 1), where scores are larger; the ratio is exp(x - 1/2), also as a logistic model."""
    generator, repeats, size = np.random.default_rng(13), 200 if is_known else 12, 500
    plain, weighted = [], []
    there = generator.normal(1, 1, size=20_000)
    others = np.abs(generator.normal(size=len(there))) * np.exp(there / 2)
    for _ in range(repeats):
        inputs = generator.normal(size=size)
        scores = np.abs(generator.normal(size=size)) * np.exp(inputs / 2)
        if is_known:
            weights, bound = np.minimum(np.exp(inputs - 0.5), 20), 20.0
        else:
            found = estimate_ratio(inputs[:, None], generator.normal(1, 1, size=(size, 1)), seed=1)
            weights, bound = found.weights, found.bound
            assert np.corrcoef(np.log(weights), inputs)[0, 1] > 0.95
            assert found.auroc == pytest.approx(stats.norm.cdf(1 / 2**0.5), abs=0.05)
        threshold = fit_weighted_threshold(scores, weights, bound, 0.9)
        weighted.append(float(np.mean(others <= threshold)))
        plain.append(float(np.mean(others <= fit_thresholds(scores, None, 0.9, num_classes=1)[0])))
    error = 3 * np.std(weighted) / repeats**0.5
    assert 0.9 - error <= np.mean(weighted) <= 0.95 + error
    assert np.mean(plain) < 0.85


def test_equal_weights_give_the_threshold_without_weights() -> None:
    scores = np.random.default_rng(14).random(199)
    assert fit_weighted_threshold(scores, np.ones(199), 1.0, 0.9) == fit_thresholds(scores, None, 0.9, num_classes=1)[0]
    assert fit_weighted_threshold(scores[:8], np.ones(8), 1.0, 0.9) is None
    assert effective_size(np.array([1.0, 1.0, 2.0])) == pytest.approx(16 / 6)


LOSSES = {
    "rare": lambda generator, shape: 5.0 * (generator.random(shape) < 0.02),
    "skewed": lambda generator, shape: 5 * generator.beta(0.3, 2.0, size=shape),
    "two": lambda generator, shape: generator.choice([0.0, 5.0], size=shape),
}


@pytest.mark.parametrize(("kind", "mean"), [("rare", 0.1), ("skewed", 5 * 0.3 / 2.3), ("two", 2.5)])
def test_the_interval_of_a_mean_cost_misses_it_no_more_often_than_is_said(kind: str, mean: float) -> None:
    generator, repeats, widths, missed = np.random.default_rng(12), 300, [], 0
    for values in LOSSES[kind](generator, (repeats, 300)):
        low, high = mean_interval(values, (0.0, 5.0), 0.9)
        assert low <= values.mean() * (1 + 1e-9) <= high * (1 + 2e-9)
        missed += not low <= mean <= high
        widths.append(high - low)
    assert is_rarely(missed, repeats, 0.1)
    hoeffding = 2 * 5 * (np.log(2 / 0.1) / (2 * 300)) ** 0.5
    assert np.mean(widths) < hoeffding * (1.05 if kind == "two" else 0.75)
    assert mean_interval(np.full(9, 2.0), (2.0, 2.0), 0.9) == (2.0, 2.0)


def test_decisions_have_the_least_expected_cost() -> None:
    costs = np.array([[0, 1, 0.3], [10, 0, 0.3]])
    probs = np.array([[0.999, 0.001], [0.95, 0.05], [0.2, 0.8], [0.5, 0.5]], dtype=np.float32)
    rule = CostRule(costs, ("a", "b", "abstain"))
    decided, expected = rule.decide(probs)
    assert decided.tolist() == [0, 2, 1, 2]
    assert expected == pytest.approx([0.01, 0.3, 0.2, 0.3], rel=1e-4)
    assert rule.of_classes(["b", "a"]).tolist() == [1, 0]  # type: ignore[union-attr]
    assert rule.of_classes(["a", "c"]) is None


def rare_positives(generator: np.random.Generator, count: int) -> tuple[NDArray, NDArray]:
    """Probabilities of a rare class, mostly small and half of what they should be, and whether examples are of it."""
    probability = special.expit(generator.normal(-3, 2.5, size=count))
    return probability, generator.random(count) < np.minimum(1, probability * 0.9)


def is_rarely(exceeded: int, repeats: int, allowed: float) -> bool:
    """Whether the Clopper-Pearson lower bound (99.9%) of the share of violations is at most what is allowed."""
    return bool(stats.binom.sf(exceeded - 1, repeats, allowed) > 1e-3)


@pytest.mark.parametrize(("level", "certainty"), [(0.7, 0.9), (0.5, 0.8)])
def test_precision_and_recall_fall_short_no_more_often_than_is_said(level: float, certainty: float) -> None:
    generator = np.random.default_rng(8)
    probability, is_positive = rare_positives(np.random.default_rng(98), 300_000)
    fits = {"precision": fit_precision, "recall": fit_recall}
    failures, passed = dict.fromkeys(fits, 0), dict.fromkeys(fits, 0)
    for _ in range(300):
        values, labels = rare_positives(generator, 800)
        for name, fit in fits.items():
            rule = fit(values, labels, level, certainty, of_class=0)
            if rule.threshold is None:
                continue
            passed[name] += 1
            flagged = probability >= rule.threshold
            failures[name] += (
                is_positive[flagged].mean() < level if name == "precision" else flagged[is_positive].mean() < level
            )
    assert passed["precision"] > 20
    assert passed["recall"] == 300
    assert all(is_rarely(count, 300, 1 - certainty) for count in failures.values()), failures
    assert failures["recall"] > 300 * (1 - certainty) / 3  # the bound is exact, up to one order statistic


def test_the_test_of_a_precision_is_the_exact_binomial_one_over_fixed_thresholds() -> None:
    values, labels = rare_positives(np.random.default_rng(9), 3000)
    rule = fit_precision(values, labels, 0.6, 0.95, of_class=0)
    assert rule.threshold in class_thresholds()
    flagged = values >= rule.threshold
    assert (rule.num_flagged, rule.num_right, rule.num_positive) == (flagged.sum(), labels[flagged].sum(), labels.sum())
    assert stats.binomtest(rule.num_right, rule.num_flagged, 0.6, alternative="greater").pvalue <= 0.05
    assert fit_precision(values, labels, 0.97, 0.95, of_class=0).threshold is None
    assert len(class_thresholds()[::20]) == NUM_CLASS_SHARES
    least = min_accepted(0.4, 0.95, num_shares=NUM_CLASS_SHARES)
    assert fit_precision(np.ones(least), np.ones(least), 0.6, 0.95, of_class=0).threshold is not None


def test_false_alarms_are_as_often_as_is_said() -> None:
    """Of 59 scores the third smallest: a rate of Beta(3, 57), 0.05 on average."""
    generator = np.random.default_rng(7)
    rates = [stats.norm.cdf(fit_outliers(generator.normal(size=59), 0.05).threshold) for _ in range(400)]
    law = stats.beta(3, 57)
    assert abs(np.mean(rates) - 0.05) < 3.3 * law.std() / 20
    assert stats.kstest(rates, law.cdf).pvalue > 0.001


def test_with_a_confidence_most_calibration_sets_keep_the_rate() -> None:
    generator = np.random.default_rng(8)
    rates = [stats.norm.cdf(fit_outliers(generator.normal(size=200), 0.05, 0.9).threshold) for _ in range(1000)]
    assert np.mean(np.array(rates) <= 0.05) > 0.85
    assert np.mean(rates) > 0.02  # and no lower than it must be


def test_an_outlier_is_what_has_a_small_conformal_p_value() -> None:
    generator = np.random.default_rng(9)
    scores, others = generator.integers(0, 30, size=99), generator.integers(0, 30, size=500)
    p_values = (1 + (scores[:, None] <= others).sum(axis=0)) / 100
    assert fit_outliers(scores, 0.1).is_outlier(others).tolist() == (p_values <= 0.1).tolist()


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="18 examples are too few for a false-alarm rate"):
        fit_outliers(np.arange(18.0), 0.05)


STORED = json.loads(Path(__file__).with_name("torchcp-sets.json").read_text())["sets"]
NUM_SPLITS = 100


def drawn_probabilities(
    generator: np.random.Generator, count: int, num_classes: int = 5
) -> tuple[NDArray, NDArray[np.int64], NDArray]:
    """Calibrated probabilities (N, K), labels and uniform numbers."""
    weights = generator.integers(1, 100, size=(count, num_classes)).astype(float) ** 4
    probs = weights / weights.sum(axis=1, keepdims=True)
    labels = (probs.cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(0, num_classes - 1)
    return probs, labels, generator.random(count)


@pytest.mark.parametrize("name", STORED)
def test_sets_are_those_of_torchcp(name: str) -> None:
    scheme, coverage, whose, how = name.split()
    generator = np.random.default_rng(0)
    (probs, labels, uniform), (others, _, theirs) = (
        drawn_probabilities(generator, 200),
        drawn_probabilities(generator, 40),
    )
    regularised = {"penalty": 0.1, "free_ranks": 2} if scheme == "raps" else {}
    is_randomized = how == "randomized"
    score = SetScore(scheme, 0 if is_randomized else None, **regularised)
    own = score.of_labels(probs, labels, uniform if is_randomized else None)
    thresholds = fit_thresholds(own, labels if whose == "by-class" else None, float(coverage), num_classes=5)
    sets = SetRule(score, thresholds).sets(others, theirs if is_randomized else None)
    assert ["".join(map(str, row)) for row in sets.astype(int)] == STORED[name]


@pytest.mark.parametrize(
    "score", [SetScore("lac"), SetScore("aps", 0), SetScore("raps", 0, 0.1, 2)], ids=lambda score: score.scheme
)
def test_coverage_over_random_splits_has_the_exact_beta_law(score: SetScore) -> None:
    """Of 49 examples the 45th score covers 0.9 on average; fewer or more by one would be five standard errors away."""
    generator, size = np.random.default_rng(1), 49
    probs, labels, uniform = drawn_probabilities(generator, 40_000)
    own = score.of_labels(probs, labels, None if score.seed is None else uniform)
    found = []
    for _ in range(NUM_SPLITS):
        is_inside = np.zeros(len(own), dtype=bool)
        is_inside[generator.permutation(len(own))[:size]] = True
        threshold = fit_thresholds(own[is_inside], None, 0.9, num_classes=5)[0]
        found.append(np.mean(own[~is_inside] <= threshold))
    law = stats.beta(45, 5)
    assert abs(np.mean(found) - 0.9) < 3.3 * law.std() / NUM_SPLITS**0.5
    assert stats.kstest(found, law.cdf).pvalue > 0.001


def test_every_class_has_the_coverage_where_each_has_a_threshold() -> None:
    generator = np.random.default_rng(2)
    probs, labels, _ = drawn_probabilities(generator, 60_000)
    labels = np.where((labels == 0) & (generator.random(len(labels)) < 0.5), 1, labels)  # no longer calibrated
    own, found = SetScore("lac").of_labels(probs, labels), []
    for _ in range(NUM_SPLITS):
        chosen = generator.permutation(len(own))[:1000]
        thresholds = fit_thresholds(own[chosen], labels[chosen], 0.9, num_classes=5)
        found.append([np.mean(own[labels == k] <= thresholds[k]) for k in range(5)])
    assert (
        np.abs(np.mean(found, axis=0) - 0.9).max() < 0.008
    )  # at most 1 / (n + 1) above, n about 150, and four standard errors
    common = fit_thresholds(own, None, 0.9, num_classes=5)[0]
    assert np.mean(own[labels == 1] <= common) < 0.88


def test_ties_only_raise_the_coverage() -> None:
    own = np.repeat([0.0, 0.5, 1.0], [30, 60, 9])
    assert fit_thresholds(own, None, 0.9, num_classes=2)[0] == 0.5
    assert fit_thresholds(own, None, 0.91, num_classes=2)[0] == 1.0


def test_the_score_of_a_class_is_what_comes_before_it_and_its_share() -> None:
    probs, uniform = np.array([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]), np.array([0.5, 0.25])
    whole = SetScore("aps").of_classes(probs)
    assert whole == pytest.approx(np.array([[1.0, 0.5, 0.8], [0.4, 0.8, 1.0]]))
    assert SetScore("aps", 0).of_classes(probs, uniform) == pytest.approx(
        np.array([[0.9, 0.25, 0.65], [0.1, 0.5, 0.85]])
    )
    raps = SetScore("raps", None, penalty=0.1, free_ranks=1).of_classes(probs)
    assert raps == pytest.approx(whole + np.array([[0.2, 0.0, 0.1], [0.0, 0.1, 0.2]]))
    assert label_ranks(probs, np.array([0, 1])).tolist() == [3, 2]
    with pytest.raises(ValueError, match="expected one uniform number per example"):
        SetScore("aps", 0).of_classes(probs)


def test_regularisation_is_chosen_for_the_smallest_sets() -> None:
    probs, labels, uniform = drawn_probabilities(np.random.default_rng(3), 400, num_classes=30)
    chosen = choose_regularisation(probs, labels, 0.9, seed=0, uniform=uniform)
    assert chosen.free_ranks == np.sort(label_ranks(probs, labels))[361 - 1]

    def size(score: SetScore) -> float:
        own = score.of_labels(probs, labels, uniform)
        return float(
            SetRule(score, fit_thresholds(own, None, 0.9, num_classes=30)).sets(probs, uniform).sum(axis=1).mean()
        )

    others = [SetScore("raps", 0, penalty, chosen.free_ranks) for penalty in (0.001, 0.01, 0.1, 0.2, 0.5)]
    assert size(chosen) == min(map(size, others))


def test_sets_may_be_filled_by_the_most_probable_class() -> None:
    probs = np.array([[0.6, 0.4], [0.9, 0.1], [0.45, 0.55]])
    plain, filled = (SetRule(SetScore("lac"), np.array([0.2]), is_filled).sets(probs) for is_filled in (False, True))
    assert plain.tolist() == [[False, False], [True, False], [False, False]]
    assert filled.tolist() == [[True, False], [True, False], [False, True]]


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="8 examples are too few for coverage"):
        fit_thresholds(np.arange(8.0), None, 0.9, num_classes=2)


def test_the_worst_class_is_that_of_least_coverage_among_those_that_are_there() -> None:
    """Of 5 classes 3 have examples, in no order; resampled weights leave classes out, and count examples several times."""
    generator = np.random.default_rng(6)
    probs, _, _ = drawn_probabilities(generator, 60)
    labels = generator.choice([1, 4, 2], size=60, p=[0.1, 0.3, 0.6])
    rule = SetRule(SetScore("lac"), np.array([0.6]))
    covered = rule.sets(probs, None)[np.arange(60), labels]
    weights = generator.multinomial(60, np.full(60, 1 / 60), size=50)
    weights[0], weights[1, labels == 1] = 1, 0
    groups = set_scores(rule, probs, labels, None, {})
    (group,) = [one for one in groups if one.members[0].name == "worst_class_coverage"]
    found = group.statistic(weights)
    assert found.shape == (50, 1)
    for row, value in zip(weights, found[:, 0], strict=True):
        there = [k for k in (1, 2, 4) if row[labels == k].sum()]
        assert value == pytest.approx(min(np.average(covered[labels == k], weights=row[labels == k]) for k in there))
    assert 0 < found[0, 0] < covered.mean()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 6), (4, 4), (3, 7), (6, 5), (8, 2)])
def test_p_values_are_the_share_of_all_orders(n: int, m: int) -> None:
    orders = [np.isin(np.arange(n + m), chosen) for chosen in combinations(range(n + m), n)]
    gaps = np.array([kolmogorov_smirnov_distance(np.flatnonzero(one), np.flatnonzero(~one)) for one in orders])
    for gap in np.unique(gaps):
        assert distance_p_value(int(gap), n, m) == pytest.approx(np.mean(gaps >= gap), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(50, 50), (200, 37), (1000, 3000)])
def test_p_values_are_those_of_scipy(n: int, m: int) -> None:
    generator = np.random.default_rng(10)
    for by in (0.0, 0.1, 0.2):
        one, other = generator.normal(size=n), generator.normal(by, size=m)
        expected = stats.ks_2samp(one, other, method="exact")
        assert kolmogorov_smirnov_distance(one, other) / (n * m) == pytest.approx(expected.statistic, abs=1e-12)
        found = distance_p_value(kolmogorov_smirnov_distance(one, other), n, m)
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
