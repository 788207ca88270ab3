"""Scores against scikit-learn, hand loops and closed forms; metric rows with their uncertainty."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

from bnncli.errors import DataError
from bnncli.evaluation import bootstrap as bootstrap_module
from bnncli.evaluation import statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import NO_RANKING
from bnncli.evaluation.decisions import SetRule, SetScore, acceptance_scores, alarm_scores, set_scores
from bnncli.evaluation.detection import form_rows
from bnncli.evaluation.fidelity import Forecasts, PredictionPair
from bnncli.evaluation.latent_networks import density_rows, prediction_density_rows, selection_rows
from bnncli.evaluation.scores import (
    ScoredPredictions,
    all_scores,
    detection_forms,
    distances,
    fidelities,
    other_split_rows,
    split_scores,
)
from bnncli.evaluation.statistics import Row, compute_example_statistics, nll, nll_per_example, score_rows

pytestmark = pytest.mark.core


def rows_of(
    probs: NDArray,
    labels: NDArray | None,
    mutual_info: NDArray | None = None,
    *,
    bootstrap: Bootstrap | None = None,
    **settings: Any,
) -> list[Row]:
    scores = split_scores(
        ScoredPredictions(probs, compute_example_statistics(probs, labels), mutual_info, settings=settings)
    )
    return score_rows(scores, ("test", len(probs)), bootstrap)


def value(
    name: str, probs: NDArray, labels: NDArray | None, mutual_info: NDArray | None = None, **settings: Any
) -> float:
    return next(row for row in rows_of(probs, labels, mutual_info, **settings) if row["name"] == name)["value"]


def accuracy(probs: NDArray, labels: NDArray) -> float:
    return value("accuracy", probs, labels)


def brier(probs: NDArray, labels: NDArray) -> float:
    return value("brier", probs, labels)


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


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_accuracy_is_that_of_scikit_learn(k: int) -> None:
    probs, labels = predictions(5)
    expected = top_k_accuracy_score(labels, probs, k=k, labels=range(5))
    assert value("top_k", probs, labels, top_k=k) == expected


def test_ties_at_the_edge_of_the_top_k_go_to_the_first_classes() -> None:
    probs = np.full((6, 6), 1 / 6)
    assert value("top_k", probs, np.arange(6), top_k=2) == pytest.approx(2 / 6)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_means_are_those_of_scipy(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    assert value("mean_confidence", probs, None) == pytest.approx(probs.max(axis=1).astype(float).mean(), rel=1e-12)
    assert value("mean_entropy", probs, labels) == pytest.approx(
        stats.entropy(probs.astype(float), axis=1).mean(), rel=1e-6
    )
    assert value("mean_mutual_info", probs, labels, np.arange(200) / 100) == pytest.approx(0.995, rel=1e-12)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_brier_is_the_mean_squared_distance_to_the_one_hot_label(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    total = 0.0
    for row, label in zip(probs.astype(np.float64), labels, strict=True):
        total += sum((p - float(k == label)) ** 2 for k, p in enumerate(row))
    assert brier(probs, labels) == pytest.approx(total / len(labels), rel=1e-12)


def test_a_label_of_probability_zero_costs_the_log_of_the_smallest_float32() -> None:
    probs = np.array([[1.0, 0.0]], dtype=np.float32)
    assert nll(probs, np.array([1])) == pytest.approx(126 * math.log(2))
    (row,) = [row for row in rows_of(probs, np.array([1])) if row["name"] == "nll"]
    assert (row["value"], row["num_clamped"]) == (pytest.approx(126 * math.log(2)), 1)
    assert brier(probs, np.array([1])) == 2.0


def test_nll_of_float32_probabilities_is_summed_in_float64() -> None:
    probs = np.full((2_000_001, 1), 0.1, dtype=np.float32)
    probs[0] = 1e-30
    expected = -(2_000_000 * math.log(float(np.float32(0.1))) + math.log(float(np.float32(1e-30)))) / 2_000_001
    assert nll(probs, np.zeros(2_000_001, dtype=int)) == pytest.approx(expected, rel=1e-12)


def test_rows_carry_the_choices_that_define_them() -> None:
    probs, labels = predictions(3)
    rows: dict[str, Row] = {}
    for row in rows_of(probs, labels):
        rows.setdefault(row["name"], row)
    assert {row["n"] for row in rows.values()} == {200}
    assert rows["accuracy"]["higher_is_better"] is True
    assert rows["top_k"].items() >= {"k": 5, "value": None, "undefined": "only 3 classes"}.items()
    assert value("top_k", probs, labels, top_k=3) is None
    assert rows["nll"].items() >= {"reduction": "mean", "value": nll(probs, labels), "num_clamped": 0}.items()
    assert rows["brier"].items() >= {"reduction": "mean", "classes": "sum"}.items()
    assert rows["ece"].items() >= {"bins": 15, "norm": "l1", "strategy": "equal-width"}.items()
    assert rows["mce"].items() >= {"bins": 15, "strategy": "equal-width", "higher_is_better": False}.items()
    assert rows["aurc"]["score"] == "max_prob"


def test_every_score_of_a_row_can_be_asked_for_by_name_and_its_forms_differ() -> None:
    rows = rows_of(*predictions(3))
    assert {row["name"] for row in rows} <= set(all_scores())
    told = [{key: row[key] for key in row if key not in ("value", "undefined")} for row in rows]
    assert len({json.dumps(choices, sort_keys=True) for choices in told}) == len(rows)


def test_every_row_has_the_direction_of_the_table() -> None:
    probs, labels = predictions(2)
    several = compute_example_statistics(probs, np.eye(2, dtype=np.int64)[labels], is_exclusive=False)
    pair = PredictionPair(Forecasts(probs), Forecasts(probs))
    rule, chosen = SetRule(SetScore("lac"), np.array([0.6])), labels == 0
    groups = [
        *split_scores(ScoredPredictions(probs, compute_example_statistics(probs, labels))),
        *split_scores(ScoredPredictions(probs, several)),
        *(make(pair) for make in fidelities()),
        *set_scores(rule, probs, labels, None, {}),
        *acceptance_scores(chosen, chosen, {}),
        *(group for is_ood in (False, True) for group in alarm_scores(chosen, {}, is_ood=is_ood)),
    ]
    inclusion = torch.rand(2, 3)
    rows = [
        *({"name": form.name, "higher_is_better": form.higher_is_better} for group in groups for form in group.members),
        *(row for row, _ in form_rows(detection_forms())),
        *other_split_rows(compute_example_statistics(probs), "far", None),
        *({**form, "name": name} for name, distance in distances().items() for form in distance.forms),
        *density_rows([inclusion], [inclusion[0]]),
        *prediction_density_rows([inclusion]),
        *selection_rows(inclusion, [1]),
    ]
    found = {(row["name"], row["higher_is_better"]) for row in rows}
    expected = {(name, score.higher_is_better) for name, score in all_scores().items()}
    assert found == expected - {("shift_p", None)}  # a p-value: of rules that are stored


@pytest.mark.parametrize(
    ("probs", "labels", "reason"),
    [(predictions(3)[0], None, "no labels"), (np.empty((0, 3)), np.empty(0, dtype=int), "empty split")],
)
def test_undefined_rows_are_none_with_a_reason(probs: NDArray, labels: NDArray | None, reason: str) -> None:
    rows = rows_of(probs, labels, bootstrap=Bootstrap(10))
    without = ("mean_confidence", "mean_entropy") if labels is None else ()
    undefined = [row for row in rows if row["name"] not in without]
    assert {row["value"] for row in undefined} == {None}
    reasons = {row["undefined"] for row in undefined}
    assert reasons >= {reason}
    others = {"only 3 classes", "expected two classes, got 3", "the integrator uses no draws", NO_RANKING}
    assert reasons <= {reason} | others
    assert "NaN" not in json.dumps(rows, allow_nan=False)


def test_defined_rows_are_strict_json_without_a_reason() -> None:
    rows = json.loads(json.dumps(rows_of(*predictions(7), np.ones(200), bootstrap=Bootstrap(20)), allow_nan=False))
    two_classes, ranked = ("miscalibration", "discrimination", "uncertainty"), ("ranked", "cumulative")
    defined = [row for row in rows if row["name"] not in two_classes and not row["name"].startswith(ranked)]
    assert all("undefined" not in row and isinstance(row["value"], float) for row in defined)
    assert all(row["interval"]["low"] <= row["interval"]["high"] for row in defined)
    errors = [row for row in defined if row["name"] in ("ece", "mce")]
    assert all(row["interval"]["replicates"] == 20 for row in defined if row not in errors)
    assert all({"floor", "excess", "p_calibrated"} <= row.keys() for row in errors)
    assert len(errors) == 7
    assert "standard_error" not in rows_of(*predictions(7))[0]


def test_the_uncertainty_of_means_is_the_textbook_one_and_of_calibration_errors_inverted() -> None:
    probs, labels = predictions(5)
    rows = {row["name"]: row for row in reversed(rows_of(probs, labels, bootstrap=Bootstrap(2000)))}
    rate = rows["accuracy"]["value"]
    assert rows["accuracy"]["standard_error"] == pytest.approx(math.sqrt(rate * (1 - rate) / 200), rel=0.1)
    losses = nll_per_example(probs, labels)
    assert rows["nll"]["standard_error"] == pytest.approx(losses.std() / math.sqrt(200), rel=0.1)
    methods = {name: row["interval"]["method"] for name, row in rows.items() if row["value"] is not None}
    others = {name: method for name, method in methods.items() if method != "percentile"}
    assert others == {"ece": "inverted", "mce": "clopper-pearson"}


def test_one_example_has_scores_but_no_uncertainty() -> None:
    rows = rows_of(np.array([[0.7, 0.3]]), np.array([0]), bootstrap=Bootstrap(20))
    by_name = {row["name"]: row for row in reversed(rows)}
    assert (by_name["accuracy"]["value"], by_name["ece"]["value"]) == (1.0, pytest.approx(0.3))
    assert by_name["aurc"]["value"] == 0
    assert {row["interval"] for row in rows if row["value"] is not None} == {None}


def test_dear_scores_get_the_replicates_that_they_can_afford(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = predictions(5)
    every = {row["name"] + str(row.get("strategy")): row for row in rows_of(probs, labels, bootstrap=Bootstrap(300))}
    monkeypatch.setattr(statistics, "MOST_OPERATIONS", 150 * 5 * 200)
    monkeypatch.setattr(bootstrap_module, "BLOCK_WEIGHTS", 70 * 200)
    some = {row["name"] + str(row.get("strategy")): row for row in rows_of(probs, labels, bootstrap=Bootstrap(300))}
    assert every["ececlass-wise"]["standard_error"] != some["ececlass-wise"]["standard_error"]
    assert every["ececlass-wise"]["interval"] == some["ececlass-wise"]["interval"]
    assert some["accuracyNone"] == every["accuracyNone"]
    monkeypatch.setattr(statistics, "MOST_OPERATIONS", 90 * 5 * 200)
    none = {row["name"] + str(row.get("strategy")): row for row in rows_of(probs, labels, bootstrap=Bootstrap(300))}
    assert none["ececlass-wise"]["standard_error"] is None
    assert none["ececlass-wise"]["interval"] == every["ececlass-wise"]["interval"]


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
        rows_of(np.full((2, 3), 1 / 3), labels)
