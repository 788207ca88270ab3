"""Scores of several labels an example, against scikit-learn; their intervals by simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics

from bnncli.errors import DataError
from bnncli.evaluation import class_scores
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import label_reliability, pooled_calibration
from bnncli.evaluation.class_scores import decision_scores, one_sided_labels
from bnncli.evaluation.curves import curve_of_bins
from bnncli.evaluation.scores import ScoredPredictions, split_scores
from bnncli.evaluation.statistics import (
    ExampleStatistics,
    Row,
    check_probabilities,
    compute_example_statistics,
    nll_per_example,
    score_rows,
)

SIZE, NUM_LABELS = 150, 5
NEVER, ALWAYS = 3, 4


def predictions(*, one_sided: bool = True) -> tuple[NDArray, NDArray]:
    """Probabilities with ties; one label that no example has and one that all have."""
    generator = np.random.default_rng(0)
    labels = (generator.random((SIZE, NUM_LABELS)) < [0.1, 0.4, 0.7, 0.3, 0.5]).astype(np.uint8)
    if one_sided:
        labels[:, NEVER], labels[:, ALWAYS] = 0, 1
    logits = 2 * generator.standard_normal(labels.shape) + 2.0 * labels - 1
    return np.round(1 / (1 + np.exp(-logits)), 2).clip(0.01, 0.99), labels


def examples(probs: NDArray, labels: NDArray | None) -> ExampleStatistics:
    return compute_example_statistics(probs, labels, is_exclusive=False)


def rows_of(probs: NDArray, labels: NDArray | None, bootstrap: Bootstrap | None = None) -> list[Row]:
    scored = ScoredPredictions(probs, examples(probs, labels), settings={"bins": 10})
    return score_rows(split_scores(scored), ("test", len(probs)), bootstrap)


def row(rows: list[Row], name: str, **choices: Any) -> Row:
    (found,) = [one for one in rows if one["name"] == name and all(one.get(k) == v for k, v in choices.items())]
    return found


def test_means_over_decisions_are_those_of_scikit_learn() -> None:
    probs, labels = predictions()
    rows = rows_of(probs, labels)
    assert row(rows, "accuracy")["value"] == pytest.approx(metrics.accuracy_score(labels, probs >= 0.5))
    hamming = row(rows, "hamming_loss")
    assert hamming["value"] == pytest.approx(metrics.hamming_loss(labels, probs >= 0.5))
    losses = [metrics.log_loss(labels[:, k], probs[:, k], labels=[0, 1]) for k in range(NUM_LABELS)]
    assert row(rows, "nll")["value"] == pytest.approx(np.mean(losses))
    assert row(rows, "nll")["per_class"] == pytest.approx(losses)
    squares = [metrics.brier_score_loss(labels[:, k], probs[:, k], labels=[0, 1]) for k in range(NUM_LABELS)]
    assert row(rows, "brier")["value"] == pytest.approx(np.mean(squares))
    assert row(rows, "brier")["per_class"] == pytest.approx(squares)
    assert hamming["per_class"] == pytest.approx(((probs >= 0.5) != labels).mean(axis=0))
    np.testing.assert_allclose(nll_per_example(probs, labels).mean(), np.mean(losses))


def test_rankings_are_those_of_scikit_learn_and_leave_out_what_is_undefined() -> None:
    probs, labels = predictions()
    rows = rows_of(probs, labels)
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
    probs, labels = predictions()
    said, rows = probs >= 0.5, rows_of(probs, labels)
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
    probs, labels = predictions()
    probs = probs + 0.003  # off the edges
    rows = rows_of(probs, labels)
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
    probs, labels = predictions()
    found = examples(probs, labels)
    expected = -(probs * np.log(probs) + (1 - probs) * np.log(1 - probs)).sum(axis=1)
    np.testing.assert_allclose(found.entropy, expected)
    np.testing.assert_array_equal(found.confidence, probs.max(axis=1))
    assert row(rows_of(probs, labels), "mean_entropy")["value"] == pytest.approx(expected.mean())


def test_labels_that_are_the_same_ones_again_tell_nothing_more() -> None:
    # Every interval, floor and test resamples examples: a label that stands there four times is no four labels.
    probs, labels = draw_correlated(np.random.default_rng(3), 90, 0.05)
    once, again = (rows_of(np.tile(probs, k), np.tile(labels, k), Bootstrap(40, 0.9, 0)) for k in (1, 4))
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
    found = row(rows_of(probs, labels), "ece", average="micro")
    assert found["floor"] == pytest.approx(np.sqrt(2 / np.pi * 0.48 * 0.52 / 100), rel=0.06)
    assert found["p_calibrated"] > 0.5


def test_without_labels_nothing_is_said_of_them_and_what_classes_need_is_not_there() -> None:
    probs, labels = predictions()
    rows = rows_of(probs, None)
    assert {one["undefined"] for one in rows if one["value"] is None} == {"no labels", "the integrator uses no draws"}
    names = {one["name"] for one in rows_of(probs, labels)}
    assert names.isdisjoint({"top_k", "aurc", "miscalibration", "ranked_length", "mean_confidence"})


def test_weights_count_examples_as_repeating_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_scores, "_AT_ONCE", 1)  # pooled rankings a replicate at a time
    probs, labels = predictions(one_sided=False)
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
            assert alike[0].statistic is not None
            np.testing.assert_allclose(found, alike[0].statistic(np.ones((1, SIZE)))[0], rtol=1e-6, err_msg=str(names))


def test_a_label_that_was_surely_absent_and_is_there_costs_what_float32_can_tell() -> None:
    probs = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    labels = np.array([[1, 0], [1, 0]], np.uint8)
    found = row(rows_of(probs, labels), "nll")
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
    _, labels = predictions()
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
