"""Prediction sets: those of TorchCP on the same scores, and the coverage that the law of order statistics says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation.decisions import (
    SetRule,
    SetScore,
    choose_regularisation,
    fit_thresholds,
    label_ranks,
    set_scores,
)

STORED = json.loads(Path(__file__).with_name("torchcp-sets.json").read_text())["sets"]
NUM_SPLITS = 100


def drawn(
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
    (probs, labels, uniform), (others, _, theirs) = drawn(generator, 200), drawn(generator, 40)
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
    probs, labels, uniform = drawn(generator, 40_000)
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
    probs, labels, _ = drawn(generator, 60_000)
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
    probs, labels, uniform = drawn(np.random.default_rng(3), 400, num_classes=30)
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
    probs, _, _ = drawn(generator, 60)
    labels = generator.choice([1, 4, 2], size=60, p=[0.1, 0.3, 0.6])
    rule = SetRule(SetScore("lac"), np.array([0.6]))
    covered = rule.sets(probs, None)[np.arange(60), labels]
    weights = generator.multinomial(60, np.full(60, 1 / 60), size=50)
    weights[0], weights[1, labels == 1] = 1, 0
    groups = set_scores(rule, probs, labels, None, {})
    (group,) = [one for one in groups if one.members[0].name == "worst_class_coverage"]
    assert group.statistic is not None
    found = group.statistic(weights)
    assert found.shape == (50, 1)
    for row, value in zip(weights, found[:, 0], strict=True):
        there = [k for k in (1, 2, 4) if row[labels == k].sum()]
        assert value == pytest.approx(min(np.average(covered[labels == k], weights=row[labels == k]) for k in there))
    assert 0 < found[0, 0] < covered.mean()
