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
from sklearn import metrics
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

from bnncli.errors import DataError
from bnncli.evaluation import bootstrap as bootstrap_module
from bnncli.evaluation import class_scores, decisions, statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import label_reliability, pooled_calibration
from bnncli.evaluation.class_scores import NO_RANKING, decision_scores, one_sided_labels
from bnncli.evaluation.curves import curve_of_bins
from bnncli.evaluation.decisions import (
    CostRule,
    SetRule,
    SetScore,
    acceptance_scores,
    alarm_scores,
    cost_scores,
    set_scores,
)
from bnncli.evaluation.detection import form_rows
from bnncli.evaluation.entities import entity_scores
from bnncli.evaluation.fidelity import Forecasts, PredictionPair
from bnncli.evaluation.groups import RowGroups
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
from bnncli.evaluation.statistics import (
    ExampleStatistics,
    Row,
    check_probabilities,
    compute_example_statistics,
    nll,
    nll_per_example,
    score_rows,
)

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
        *entity_scores(compute_example_statistics(probs, labels), ["O", "B-PER"], RowGroups(labels), None),
        *(make(pair) for make in fidelities()),
        *set_scores(rule, probs, labels, None, {}),
        *acceptance_scores(chosen, chosen, {}),
        *decisions.class_scores(chosen, chosen, {}),
        *cost_scores(CostRule(np.eye(2), ("no", "yes")), probs, labels, ["0", "1"], {}),
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


SIZE, NUM_LABELS = 150, 5
NEVER, ALWAYS = 3, 4


def label_predictions(*, one_sided: bool = True) -> tuple[NDArray, NDArray]:
    """Probabilities with ties; one label that no example has and one that all have."""
    generator = np.random.default_rng(0)
    labels = (generator.random((SIZE, NUM_LABELS)) < [0.1, 0.4, 0.7, 0.3, 0.5]).astype(np.uint8)
    if one_sided:
        labels[:, NEVER], labels[:, ALWAYS] = 0, 1
    logits = 2 * generator.standard_normal(labels.shape) + 2.0 * labels - 1
    return np.round(1 / (1 + np.exp(-logits)), 2).clip(0.01, 0.99), labels


def examples(probs: NDArray, labels: NDArray | None) -> ExampleStatistics:
    return compute_example_statistics(probs, labels, is_exclusive=False)


def label_rows_of(probs: NDArray, labels: NDArray | None, bootstrap: Bootstrap | None = None) -> list[Row]:
    scored = ScoredPredictions(probs, examples(probs, labels), settings={"bins": 10})
    return score_rows(split_scores(scored), ("test", len(probs)), bootstrap)


def row(rows: list[Row], name: str, **choices: Any) -> Row:
    (found,) = [one for one in rows if one["name"] == name and all(one.get(k) == v for k, v in choices.items())]
    return found


def test_means_over_decisions_are_those_of_scikit_learn() -> None:
    probs, labels = label_predictions()
    rows = label_rows_of(probs, labels)
    assert row(rows, "accuracy")["value"] == pytest.approx(metrics.accuracy_score(labels, probs >= 0.5))
    hamming = row(rows, "hamming_loss")
    assert hamming["value"] == pytest.approx(metrics.hamming_loss(labels, probs >= 0.5))
    losses = [metrics.log_loss(labels[:, k], probs[:, k], labels=[0, 1]) for k in range(NUM_LABELS)]
    assert row(rows, "nll")["value"] == pytest.approx(np.mean(losses))
    assert row(rows, "nll")["per_class"] == pytest.approx(losses)
    squares = np.square(probs - labels).mean(axis=0).tolist()  # brier_score_loss refuses a label that never varies
    assert row(rows, "brier")["value"] == pytest.approx(np.mean(squares))
    assert row(rows, "brier")["per_class"] == pytest.approx(squares)
    assert hamming["per_class"] == pytest.approx(((probs >= 0.5) != labels).mean(axis=0))
    np.testing.assert_allclose(nll_per_example(probs, labels).mean(), np.mean(losses))


def test_rankings_are_those_of_scikit_learn_and_leave_out_what_is_undefined() -> None:
    probs, labels = label_predictions()
    rows = label_rows_of(probs, labels)
    for name, score in (
        ("class_auroc", metrics.roc_auc_score),
        ("class_average_precision", metrics.average_precision_score),
    ):
        expected = [None if k in (NEVER, ALWAYS) else score(labels[:, k], probs[:, k]) for k in range(NUM_LABELS)]
        macro, micro = row(rows, name, average="macro"), row(rows, name, average="micro")
        assert macro["per_class"] == [None if value is None else pytest.approx(value) for value in expected]
        assert macro["value"] == pytest.approx(np.mean([value for value in expected if value is not None]))
        assert macro["num_left_out"] == 2
        assert micro["value"] == pytest.approx(score(labels, probs, average="micro"))


def test_counts_by_label_are_those_of_scikit_learn() -> None:
    probs, labels = label_predictions()
    said, rows = probs >= 0.5, label_rows_of(probs, labels)
    present = [k for k in range(NUM_LABELS) if k != NEVER]
    for name, score in (("macro_f1", metrics.f1_score), ("macro_precision", metrics.precision_score)):
        each = score(labels, said, average=None, zero_division=0)
        assert row(rows, name)["value"] == pytest.approx(each[present].mean())
        assert row(rows, name)["num_left_out"] == 1
    two_sided = [k for k in present if k != ALWAYS]
    balanced = [metrics.balanced_accuracy_score(labels[:, k], said[:, k]) for k in two_sided]
    assert row(rows, "balanced_accuracy")["value"] == pytest.approx(np.mean(balanced))


def naive_ece(probs: NDArray, labels: NDArray, num_bins: int = 10) -> float:
    """ECE of binary forecasts, bin by bin."""
    flat, own = probs.ravel(), labels.ravel()
    gaps, shares = [], []
    for low, high in zip(np.arange(num_bins) / num_bins, np.arange(1, num_bins + 1) / num_bins, strict=True):
        inside = (flat > low) & (flat <= high)
        if inside.any():
            gaps.append(abs(flat[inside].mean() - own[inside].mean()))
            shares.append(inside.mean())
    return float(np.dot(gaps, shares))


def test_calibration_errors_are_of_all_decisions_and_label_by_label() -> None:
    probs, labels = label_predictions()
    probs = probs + 0.003  # off the edges
    rows = label_rows_of(probs, labels)
    ece = naive_ece(probs, labels)
    pooled = row(rows, "ece", strategy="equal-width")
    assert pooled["value"] == pytest.approx(ece)
    assert 0 < pooled["floor"] < 0.1
    each = [naive_ece(probs[:, k], labels[:, k]) for k in range(NUM_LABELS)]
    by_label = row(rows, "ece", strategy="class-wise")
    assert by_label["per_class"] == pytest.approx(each)
    assert by_label["value"] == pytest.approx(np.mean(each))
    curve = curve_of_bins(label_reliability(probs, labels, num_bins=10))
    assert sum(curve["count"]) == probs.size


def test_entropy_is_the_sum_over_the_labels_and_confidence_the_largest_probability() -> None:
    probs, labels = label_predictions()
    found = examples(probs, labels)
    expected = -(probs * np.log(probs) + (1 - probs) * np.log(1 - probs)).sum(axis=1)
    np.testing.assert_allclose(found.entropy, expected)
    np.testing.assert_array_equal(found.confidence, probs.max(axis=1))
    assert row(label_rows_of(probs, labels), "mean_entropy")["value"] == pytest.approx(expected.mean())


def test_labels_that_are_the_same_ones_again_tell_nothing_more() -> None:
    # Every interval, floor and test resamples examples: a label that stands there four times is no four labels.
    probs, labels = draw_correlated(np.random.default_rng(3), 90, 0.05)
    once, again = (label_rows_of(np.tile(probs, k), np.tile(labels, k), Bootstrap(40, 0.9, 0)) for k in (1, 4))
    for one, four in zip(once, again, strict=True):
        if one["name"] in ("mean_entropy", "mean_mutual_info"):  # sums over the labels, and nothing
            continue
        for name in ("value", "standard_error", "p_calibrated"):
            assert one.get(name) == pytest.approx(four.get(name)), one
        ends = [(row["interval"] or {}) if "interval" in row else {} for row in (one, four)]
        for end in ("low", "high"):
            assert ends[0].get(end) == pytest.approx(ends[1].get(end), abs=1e-9), one


def test_examples_that_are_all_alike_have_a_floor_all_the_same() -> None:
    # They show no noise of their own; a calibrated model of independent labels has some: 100 coins, 5 of 100 off on average.
    probs, labels = np.full((50, 2), 0.48), np.tile(np.array([[0, 1]], np.uint8), (50, 1))
    found = row(label_rows_of(probs, labels), "ece", average="micro")
    assert found["floor"] == pytest.approx(np.sqrt(2 / np.pi * 0.48 * 0.52 / 100), rel=0.06)
    assert found["p_calibrated"] > 0.5


def test_without_labels_nothing_is_said_of_them_and_what_classes_need_is_not_there() -> None:
    probs, labels = label_predictions()
    rows = label_rows_of(probs, None)
    assert {one["undefined"] for one in rows if one["value"] is None} == {"no labels", "the integrator uses no draws"}
    names = {one["name"] for one in label_rows_of(probs, labels)}
    assert names.isdisjoint({"top_k", "aurc", "miscalibration", "ranked_length", "mean_confidence"})


def test_weights_count_examples_as_repeating_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_scores, "_AT_ONCE", 1)  # pooled rankings a replicate at a time
    probs, labels = label_predictions(one_sided=False)
    weights = np.random.default_rng(1).multinomial(SIZE, np.full(SIZE, 1 / SIZE), size=2).astype(np.float32)
    scored = ScoredPredictions(probs, examples(probs, labels), settings={"bins": 10})
    for group in split_scores(scored):
        if group.statistic is None:
            continue
        for one, found in zip(weights, group.statistic(weights), strict=True):
            places = np.repeat(np.arange(SIZE), one.astype(int))
            again = ScoredPredictions(probs[places], examples(probs[places], labels[places]), settings={"bins": 10})
            names = [member.name for member in group.members]
            alike = [
                g
                for g in split_scores(again)
                if [(m.name, m.choices) for m in g.members] == [(m.name, m.choices) for m in group.members]
            ]
            assert len(alike) == 1, names
            np.testing.assert_allclose(found, alike[0].statistic(np.ones((1, SIZE)))[0], rtol=1e-6, err_msg=str(names))


def test_a_label_that_was_surely_absent_and_is_there_costs_what_float32_can_tell() -> None:
    probs = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    labels = np.array([[1, 0], [1, 0]], np.uint8)
    found = row(label_rows_of(probs, labels), "nll")
    assert found["num_clamped"] == 2
    expected = -np.log([np.finfo(np.float32).tiny, 2.0**-25]).sum() / 4
    assert found["value"] == pytest.approx(expected)


def test_probabilities_need_not_sum_to_one_but_lie_between_zero_and_one() -> None:
    check_probabilities(np.array([[0.9, 0.9]]), 2, is_exclusive=False)
    with pytest.raises(DataError, match="sum to 1"):
        check_probabilities(np.array([[0.9, 0.9]]), 2)
    with pytest.raises(DataError, match=r"values in \[0, 1\], got 0.5 to 1.5"):
        check_probabilities(np.array([[0.5, 1.5]]), 2, is_exclusive=False)
    with pytest.raises(DataError, match=r"expected shape \(1, 2\), got \(1,\)"):
        examples(np.array([[0.9, 0.9]]), np.array([1]))
    with pytest.raises(DataError, match="zeros and ones"):
        examples(np.array([[0.9, 0.9]]), np.array([[1, 2]]))


def test_labels_that_none_or_all_have_are_named() -> None:
    _, labels = label_predictions()
    assert one_sided_labels(labels, list("abcde")) == (["d"], ["e"])


def draw_correlated(generator: np.random.Generator, size: int, shift: float) -> tuple[NDArray, NDArray]:
    """Probabilities that are `shift` too high, and labels that a common cause ties together within an example."""
    probs = generator.uniform(0.15, 0.8, size=(size, 4))
    common = generator.random((size, 1)) < 0.5
    draws = np.where(common, generator.random((size, 1)), generator.random((size, 4)))
    return probs, (draws < probs - shift).astype(np.uint8)


@pytest.mark.nightly
@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_intervals_hold_the_truth_as_often_as_they_say_where_labels_are_correlated(shift: float) -> None:
    generator, trials = np.random.default_rng(0), 120
    probs, labels = draw_correlated(generator, 100_000, shift)
    rows = score_rows(decision_scores(probs, examples(probs, labels)), ("many", len(probs)))
    truth = {"ece": shift, **{name: row(rows, name)["value"] for name in ("nll", "hamming_loss")}}
    held = dict.fromkeys(truth, 0)
    for trial in range(trials):
        probs, labels = draw_correlated(generator, 150, shift)
        groups = [*decision_scores(probs, examples(probs, labels)), pooled_calibration(probs, labels, num_bins=10)]
        rows = score_rows(groups, ("test", 150), Bootstrap(200, 0.9, trial))
        for name in held:
            ends = row(rows, name)["interval"]
            held[name] += ends["low"] <= truth[name] <= ends["high"]
    # 90 % intervals; less 3 standard errors.
    assert min(held.values()) >= 98, held


def test_the_floor_is_what_a_calibrated_model_of_correlated_labels_scores() -> None:
    generator = np.random.default_rng(1)
    floors, values, p_values = [], [], []
    for trial in range(60):
        probs, labels = draw_correlated(generator, 60, 0.0)
        group = pooled_calibration(probs, labels, num_bins=10)
        (found,) = score_rows([group], ("test", 60), Bootstrap(2, 0.9, trial))
        floors.append(found["floor"])
        values.append(found["value"])
        p_values.append(found["p_calibrated"])
    error = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(floors) - np.mean(values)) < 3 * error
    assert np.mean(np.array(p_values) <= 0.2) == pytest.approx(0.2, abs=3 * np.sqrt(0.16 / 60))
