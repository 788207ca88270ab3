"""Calibration errors, in all their forms, against brute-force loops and cases with known answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.evaluation import statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import Reliability, calibration_scores, class_wise_scores, reliability
from bnncli.evaluation.statistics import ExampleStatistics, Row, examples_of, score_rows


def rows_of(probs: NDArray, labels: NDArray, *, num_bins: int = 15, bootstrap: Bootstrap | None = None) -> list[Row]:
    scores = [*calibration_scores(examples_of(probs, labels), num_bins=num_bins)]
    scores.append(class_wise_scores(probs, labels, num_bins=num_bins))
    return score_rows(scores, ("test", len(labels)), bootstrap)


def value(
    probs: NDArray, labels: NDArray, name: str, strategy: str = "equal-width", *, norm: str = "l1", num_bins: int = 15
) -> float:
    """The calibration error of this name and form."""
    groups = calibration_scores(examples_of(probs, labels), num_bins=num_bins)
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
    return reliability(examples_of(probs, labels), **settings)


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


def test_bins_are_closed_on_the_right() -> None:
    examples = with_confidence(np.array([0.25, 0.250001, 0.5, 0.75, 1.0]))
    assert reliability(examples, num_bins=4).count.tolist() == [1, 2, 1, 1]


def test_confidence_zero_is_in_the_first_bin_and_one_in_the_last() -> None:
    bins = reliability(with_confidence(np.array([0.0, 1.0, 1.0 + 1e-7])))
    assert bins.count.tolist() == [1] + [0] * 13 + [2]


def test_no_example_is_left_out() -> None:
    probs, labels = predictions(3)
    assert bins_of(probs, labels).count.sum() == len(labels)


def test_empty_bins_have_no_confidence_and_no_gap() -> None:
    bins = bins_of(*binary(0.9, 6, 4))
    assert bins.count.tolist() == [0] * 13 + [10] + [0]
    assert np.isnan(bins.confidence[:13]).all()
    assert np.isnan(bins.accuracy[14])
    assert (bins.confidence[13], bins.accuracy[13]) == pytest.approx((0.9, 0.6))


@pytest.mark.parametrize(
    ("confidence", "num_right", "num_wrong", "expected"),
    [(0.999, 50, 0, 0.001), (0.995, 50, 50, 0.495), (1.0, 3, 1, 0.25), (0.75, 3, 1, 0.0)],
)
def test_one_confidence_has_the_known_error(confidence: float, num_right: int, num_wrong: int, expected: float) -> None:
    probs, labels = binary(confidence, num_right, num_wrong)
    assert ece(probs, labels) == pytest.approx(expected, abs=1e-12)
    assert mce(probs, labels) == pytest.approx(expected, abs=1e-12)


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


def test_the_largest_error_is_at_least_the_expected_one() -> None:
    probs, labels = predictions(4)
    for strategy in ("equal-width", "equal-mass"):
        assert 0 < value(probs, labels, "ece", strategy) < value(probs, labels, "mce", strategy) <= 1


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


def test_the_debiased_error_of_calibrated_predictions_is_lower_than_the_plain_one() -> None:
    generator = np.random.default_rng(5)
    found: dict[str, list[float]] = {"l1": [], "l2": []}
    for _ in range(30):
        probs = generator.dirichlet(np.ones(3), size=500)
        labels = (probs.cumsum(axis=1) < generator.random((500, 1))).sum(axis=1)
        for norm, values in found.items():
            values.append(value(probs, labels, "ece", "equal-mass", norm=norm))
    # Half of the debiased squares are below zero, where the error is cut off.
    assert np.mean(np.array(found["l2"]) == 0) == pytest.approx(0.5, abs=0.35)
    assert min(found["l1"]) > 0.015


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
    scores = [*calibration_scores(examples_of(probs, labels)), class_wise_scores(probs, labels)]
    (weights,) = next(Bootstrap(3).weights(("test", 300)))
    repeated = np.repeat(np.arange(300), weights[1].astype(int))
    for row, other in zip(
        [float(v) for group in scores for v in group.statistic(weights)[1]],
        rows_of(probs[repeated], labels[repeated]),
        strict=True,
    ):
        if other["strategy"] != "equal-mass":  # whose edges stay those of the sample
            assert row == pytest.approx(other["value"], rel=1e-5)
