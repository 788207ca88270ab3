"""Selective prediction and scores of each class."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from problems.command_line import Cli, new_run
from sklearn import metrics

from bnncli.evaluation import class_scores
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import per_class_scores, rare_classes, selective_scores
from bnncli.evaluation.statistics import ExampleStatistics, Row, compute_example_statistics, score_rows


def examples(confidence: Sequence[float] | NDArray, is_right: Sequence[bool] | NDArray) -> ExampleStatistics:
    """Examples with these confidences, right or wrong."""
    level, right = np.asarray(confidence, dtype=float), np.asarray(is_right, dtype=bool)
    whole = np.where(right, 0, 1)
    return ExampleStatistics(2, level, 0 * whole, level, level, whole, right, level, whole)


def areas(one: ExampleStatistics, weights: NDArray | None = None) -> NDArray:
    statistic = selective_scores(one).statistic
    return statistic(np.ones((1, len(one))) if weights is None else weights)


def curve_area(is_right: Sequence[bool]) -> float:
    """Mean error rate among the first i, in this order."""
    errors = np.cumsum(~np.asarray(is_right, dtype=bool))
    return float(np.mean(errors / np.arange(1, len(errors) + 1)))


def random_examples(count: int = 80) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(0)
    confidence = generator.permutation(np.linspace(0.3, 1, count))
    return confidence, generator.random(count) < confidence


def test_the_area_is_the_loop_along_the_curve() -> None:
    confidence, is_right = random_examples()
    area, excess = areas(examples(confidence, is_right))[0]
    assert area == pytest.approx(curve_area(is_right[np.argsort(-confidence)]), rel=1e-12)
    best = curve_area(np.sort(is_right)[::-1])
    assert excess == pytest.approx(area - best, rel=1e-9)


def test_ties_count_as_the_mean_over_their_orders() -> None:
    confidence = [0.9, 0.8, 0.8, 0.8, 0.5, 0.5]
    is_right = [True, False, True, False, True, False]
    orders = [
        [is_right[0], *middle, *last]
        for middle in itertools.permutations(is_right[1:4])
        for last in itertools.permutations(is_right[4:])
    ]
    expected = np.mean([curve_area(order) for order in orders])
    assert areas(examples(confidence, is_right))[0, 0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("is_right", "expected"),
    [
        ([True] * 5, (0, 0)),
        ([False] * 5, (1, 0)),
        ([True, True, False], (1 / 9, 0)),
        ([False, True], (3 / 4, 1 / 2)),
        ([True], (0, 0)),
        ([False], (1, 0)),
    ],
)
def test_known_areas(is_right: list[bool], expected: tuple[float, float]) -> None:
    confidence = np.linspace(1, 0.5, len(is_right))
    assert areas(examples(confidence, is_right))[0] == pytest.approx(expected, abs=1e-12)


def test_weights_count_as_repeated_examples() -> None:
    confidence, is_right = random_examples()
    confidence = confidence.round(1)
    (weights,) = next(Bootstrap(5).weights(("test", 80)))
    measured = areas(examples(confidence, is_right), weights)
    for row, expected in zip(weights.astype(int), measured, strict=True):
        again = np.repeat(np.arange(80), row)
        assert areas(examples(confidence[again], is_right[again]))[0] == pytest.approx(expected, rel=1e-9)


SIZE = 150


def predictions(num_classes: int = 5, *, missing: int | None = 3) -> tuple[NDArray, NDArray]:
    """Predictions with ties, of imbalanced labels without one class."""
    generator = np.random.default_rng(0)
    labels = np.minimum(generator.geometric(0.5, SIZE) - 1, num_classes - 1)
    labels = np.where(labels == missing, 0, labels) if missing is not None else labels
    logits = 2 * generator.standard_normal((SIZE, num_classes)) + 1.5 * np.eye(num_classes)[labels]
    probs = np.round(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), 2)
    probs[np.arange(SIZE), probs.argmax(axis=1)] += 1 - probs.sum(axis=1)
    return probs, labels


def rows_of(probs: NDArray, labels: NDArray | None, *, bootstrap: Bootstrap | None = None) -> dict[str, Row]:
    rows = score_rows(
        per_class_scores(probs, compute_example_statistics(probs, labels)), ("test", len(probs)), bootstrap
    )
    return {row["name"]: row for row in rows}


def by_scikit_learn(probs: NDArray, labels: NDArray) -> dict[str, list[float | None]]:
    """The values of every class."""
    predicted, classes = probs.argmax(axis=1), range(probs.shape[1])
    present, told = set(labels.tolist()), set(predicted.tolist())
    shared = {"labels": list(classes), "average": None, "zero_division": 0}
    recall, f1, precision = (
        f(labels, predicted, **shared) for f in (metrics.recall_score, metrics.f1_score, metrics.precision_score)
    )
    found: dict[str, list[float | None]] = {
        "balanced_accuracy": [recall[k] if k in present else None for k in classes],
        "macro_f1": [f1[k] if k in present else None for k in classes],
        "macro_precision": [precision[k] if k in present and k in told else None for k in classes],
    }
    for name, score in (
        ("class_auroc", metrics.roc_auc_score),
        ("class_average_precision", metrics.average_precision_score),
    ):
        found[name] = [float(score(labels == k, probs[:, k])) if k in present else None for k in classes]
    return found


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("missing", [None, 3])
def test_values_of_classes_and_their_means_are_those_of_scikit_learn(num_classes: int, missing: int | None) -> None:
    probs, labels = predictions(num_classes, missing=missing)
    rows = rows_of(probs, labels)
    for name, expected in by_scikit_learn(probs, labels).items():
        found = rows[name]["per_class"]
        assert [value is None for value in found] == [value is None for value in expected], name
        assert [v for v in found if v is not None] == pytest.approx([v for v in expected if v is not None], rel=1e-9), (
            name
        )
        present = [0.0 if v is None else v for k, v in enumerate(expected) if k in labels]
        assert rows[name]["value"] == pytest.approx(np.mean(present), rel=1e-9), name
    predicted = probs.argmax(axis=1)
    assert rows["balanced_accuracy"]["value"] == pytest.approx(
        np.mean([np.mean(predicted[labels == k] == k) for k in set(labels)])
    )
    macro = metrics.f1_score(labels, predicted, labels=sorted(set(labels)), average="macro", zero_division=0)
    assert rows["macro_f1"]["value"] == pytest.approx(macro)


def test_replicates_are_the_scores_of_repeated_examples() -> None:
    probs, labels = predictions()
    groups = per_class_scores(probs, compute_example_statistics(probs, labels))
    (weights,) = next(Bootstrap(4).weights(("test", SIZE)))
    for replicate in range(4):
        repeated = np.repeat(np.arange(SIZE), weights[replicate].astype(int))
        expected = [row["value"] for row in rows_of(probs[repeated], labels[repeated]).values()]
        found = [v for g in groups for v in g.statistic(weights)[replicate]]  # type: ignore[misc]
        assert found == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_balanced_accuracy_holds_the_truth_as_often_as_it_says() -> None:
    # Two classes of shares .8 and .2 with recalls .9 and .6: balanced accuracy .75.
    generator, trials, hits = np.random.default_rng(1), 150, 0
    for trial in range(trials):
        labels = (generator.random(200) < 0.2).astype(int)
        is_right = generator.random(200) < np.where(labels == 1, 0.6, 0.9)
        probs = np.eye(2)[np.where(is_right, labels, 1 - labels)]
        (counted, _) = per_class_scores(probs, compute_example_statistics(probs, labels))
        (row, *_) = score_rows([counted], ("test", 200), Bootstrap(200, 0.9, trial))
        hits += row["interval"]["low"] <= 0.75 <= row["interval"]["high"]
    assert hits / trials == pytest.approx(0.9, abs=3 * np.sqrt(0.9 * 0.1 / trials) + 0.01)


def test_scores_without_labels_or_of_one_class_or_of_too_many_are_undefined_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probs, labels = predictions()
    assert {row["undefined"] for row in rows_of(probs, None).values()} == {"no labels"}
    one = rows_of(probs, np.zeros(SIZE, dtype=int))
    assert one["class_auroc"]["value"] is None
    assert one["class_auroc"]["undefined"] == "no class has both positive and negative examples"
    assert one["balanced_accuracy"]["value"] == np.mean(probs.argmax(axis=1) == 0)
    monkeypatch.setattr(class_scores, "MOST_PROBABILITIES", 700)
    many = rows_of(probs, labels)
    assert "750 probabilities are more than the 700" in many["class_auroc"]["undefined"]
    assert many["macro_f1"]["value"] is not None


def test_missing_and_rare_classes_are_told_apart() -> None:
    labels = np.repeat([0, 1, 3], [20, 9, 10])
    assert rare_classes(labels, ["a", "b", "c", "d"]) == (["c"], ["b (9)"])


def test_evaluate_names_missing_classes_and_gives_the_values_of_each_on_request(cli: Cli, small_run: Path) -> None:
    arrays = dict(np.load(small_run.with_name("features.npz")))
    arrays["labels_val"] = np.where(arrays["labels_val"] == 2, 1, arrays["labels_val"])
    arrays["labels_val"][:4] = 0
    run = new_run(cli, small_run.with_name("rare"), arrays, "--ood", "far")
    assert cli("predict", run).code == 0
    done = cli(
        "evaluate", run, "--metric", "balanced_accuracy", "--metric", "class_auroc", "--assert", "macro_f1@val>0"
    )
    assert done.code == 0
    assert "split val has no examples of class 2: means over classes omit them" in done.stderr
    assert "split test" not in done.stderr
    assert {"balanced accuracy", "class AUROC"} <= {word.strip() for word in done.stdout.splitlines()[0].split("|")}
    shown = cli("evaluate", run, "--split", "val", "--per-class", "--json").json["rows"][0]["metrics"]
    found = {metric["name"]: metric for metric in shown}
    assert [value is None for value in found["class_auroc"]["per_class"]] == [False, False, True]
    plain = cli("evaluate", run, "--json").json["rows"][0]["metrics"]
    assert not any("per_class" in metric for metric in plain)
