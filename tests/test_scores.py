"""Scores against scikit-learn and hand loops; metric rows; the checks on probabilities."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, log_loss

from bnncli.errors import DataError
from bnncli.evaluation.rows import in_distribution_rows
from bnncli.evaluation.scores import accuracy, brier, nll


def predictions(num_classes: int, *, count: int = 200, seed: int = 0) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)
    return probs, generator.integers(num_classes, size=count)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_accuracy_is_that_of_scikit_learn(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    assert accuracy(probs, labels) == accuracy_score(labels, probs.argmax(axis=1))


@pytest.mark.parametrize("num_classes", [2, 5])
def test_nll_is_that_of_scikit_learn(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    probs = np.clip(probs.astype(np.float64), 1e-6, None)
    probs /= probs.sum(axis=1, keepdims=True)
    assert nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=range(num_classes)), rel=1e-12)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_brier_is_the_mean_squared_distance_to_the_one_hot_label(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    total = 0.0
    for row, label in zip(probs.astype(np.float64), labels, strict=True):
        total += sum((p - float(k == label)) ** 2 for k, p in enumerate(row))
    assert brier(probs, labels) == pytest.approx(total / len(labels), rel=1e-12)


def test_uniform_predictions_of_ten_classes_have_brier_nine_tenths_and_nll_log_ten() -> None:
    probs, labels = np.full((30, 10), 0.1), np.arange(30) % 10
    assert brier(probs, labels) == pytest.approx(0.9)
    assert nll(probs, labels) == pytest.approx(math.log(10))


def test_sure_and_right_scores_zero_loss() -> None:
    labels = np.array([0, 2, 1])
    probs = np.eye(3, dtype=np.float32)[labels]
    assert (accuracy(probs, labels), nll(probs, labels), brier(probs, labels)) == (1.0, 0.0, 0.0)


def test_a_label_of_probability_zero_costs_the_log_of_the_smallest_float32() -> None:
    probs = np.array([[1.0, 0.0]], dtype=np.float32)
    assert nll(probs, np.array([1])) == pytest.approx(126 * math.log(2))
    assert brier(probs, np.array([1])) == 2.0


@pytest.mark.parametrize("score", [accuracy, nll, brier])
def test_scores_do_not_depend_on_the_order_of_examples(score: object) -> None:
    assert callable(score)
    probs, labels = predictions(4)
    order = np.random.default_rng(1).permutation(len(labels))
    assert score(probs[order], labels[order]) == pytest.approx(score(probs, labels), rel=1e-12)


def test_nll_of_float32_probabilities_is_summed_in_float64() -> None:
    probs = np.full((2_000_001, 1), 0.1, dtype=np.float32)
    probs[0] = 1e-30
    expected = -(2_000_000 * math.log(float(np.float32(0.1))) + math.log(float(np.float32(1e-30)))) / 2_000_001
    assert nll(probs, np.zeros(2_000_001, dtype=int)) == pytest.approx(expected, rel=1e-12)


def test_rows_carry_the_choices_that_define_them() -> None:
    probs, labels = predictions(3)
    rows = {row["name"]: row for row in in_distribution_rows(probs, labels)}
    assert list(rows) == ["accuracy", "nll", "brier", "ece", "mce"]
    assert {row["n"] for row in rows.values()} == {200}
    assert rows["accuracy"]["higher_is_better"] is True
    assert rows["nll"].items() >= {"reduction": "mean", "value": nll(probs, labels)}.items()
    assert rows["brier"].items() >= {"reduction": "mean", "classes": "sum"}.items()
    assert rows["ece"].items() >= {"bins": 15, "norm": "l1", "strategy": "equal-width"}.items()
    assert rows["mce"].items() >= {"bins": 15, "strategy": "equal-width", "higher_is_better": False}.items()


@pytest.mark.parametrize(
    ("probs", "labels", "reason"),
    [
        (predictions(3)[0], None, "no labels"),
        (np.empty((0, 3)), np.empty(0, dtype=int), "empty split"),
    ],
)
def test_undefined_rows_are_none_with_a_reason(probs: NDArray, labels: NDArray | None, reason: str) -> None:
    rows = in_distribution_rows(probs, labels)
    assert [row["value"] for row in rows] == [None] * 5
    assert {row["undefined"] for row in rows} == {reason}
    assert "NaN" not in json.dumps(rows, allow_nan=False)


def test_defined_rows_are_strict_json_without_a_reason() -> None:
    rows = json.loads(json.dumps(in_distribution_rows(*predictions(3)), allow_nan=False))
    assert all("undefined" not in row and isinstance(row["value"], float) for row in rows)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 3]), "expected 0 to 2, got 0 to 3"),
        (np.array([-1, 0]), "expected 0 to 2, got -1 to 0"),
        (np.array([0]), r"expected shape \(2,\), got \(1,\)"),
        (np.array([0.0, 1.0]), "expected integers, got float64"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: NDArray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        in_distribution_rows(np.full((2, 3), 1 / 3), labels)
