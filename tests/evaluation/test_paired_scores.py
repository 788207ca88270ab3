"""The scores that compare measures, against those that evaluate makes of the same predictions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.commands.compare import compared
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import Ranking, detection_rows
from bnncli.evaluation.scores import ScoredPredictions, detection_forms, split_scores
from bnncli.evaluation.statistics import ExampleStatistics, examples_of, score_rows
from bnncli.options.scoring import parse_score
from bnncli.session.recommendation import measure_detection, measure_split, needed_scores

SIZE = 150


def wanted(*texts: str) -> list:
    return [parse_score(text, "--metric", compared()) for text in texts]


def predictions(seed: int, labels: NDArray) -> tuple[NDArray, ExampleStatistics]:
    logits = np.random.default_rng(seed).normal(size=(len(labels), 4)) + 1.5 * np.eye(4)[labels]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probs, examples_of(probs, labels)


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
        groups.append(split_scores(ScoredPredictions(probs, examples_of(probs, labels))))
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
        [split_scores(ScoredPredictions(probs, examples_of(probs)))],
        wanted("nll", "mean_entropy"),
        split=("test", SIZE),
    )
    assert [(one.value is None, one.undefined) for one in found] == [(True, "no labels"), (False, None)]
    assert found[1].replicates is None


def test_detection_is_that_of_evaluate_and_only_what_is_wanted_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
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
    built = []
    monkeypatch.setattr(Ranking, "__post_init__", lambda self: built.append(self))
    measure_detection(pairs, wanted("auroc"), **sizes)
    assert len(built) == 2


def test_the_scores_that_are_needed_are_those_that_are_asked_for() -> None:
    names = ("max_prob", "entropy", "energy")
    assert needed_scores(names, wanted("auroc", "fpr95:far:entropy"), "far") == ["max_prob", "entropy"]
    assert needed_scores(names, wanted("auroc:near"), "far") == []


def test_an_empty_split_leaves_detection_undefined() -> None:
    pairs = [({"max_prob": np.zeros(3)}, {"max_prob": np.zeros(0)})]
    ((one,),) = measure_detection(pairs, wanted("auroc"), split=("test", 3), ood=("far", 0), bootstrap=Bootstrap(5))
    assert (one.value, one.undefined) == (None, "only one class is present: split far is empty")
