"""Calibration errors against a brute-force loop and cases with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.evaluation.calibration import ece, mce, reliability


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
    confidence = np.array([0.25, 0.250001, 0.5, 0.75, 1.0])
    probs = np.column_stack([confidence] + [(1 - confidence) / 8] * 8)
    assert reliability(probs, np.zeros(5), num_bins=4).count.tolist() == [1, 2, 1, 1]


def test_confidence_zero_is_in_the_first_bin_and_one_in_the_last() -> None:
    bins = reliability(np.array([[0.0], [1.0], [1.0 + 1e-7]]), np.zeros(3))
    assert bins.count.tolist() == [1] + [0] * 13 + [2]


def test_no_example_is_left_out() -> None:
    probs, labels = predictions(3)
    assert reliability(probs, labels).count.sum() == len(labels)


def test_empty_bins_have_no_confidence_and_no_gap() -> None:
    bins = reliability(*binary(0.9, 6, 4))
    assert bins.count.tolist() == [0] * 13 + [10] + [0]
    assert np.isnan(bins.confidence[:13]).all()
    assert bins.gap.tolist() == pytest.approx([0] * 13 + [0.3] + [0])


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
    bins = reliability(probs, labels)
    # The gap of a bin of n examples is about normal with standard deviation at most 1 / (2 sqrt n).
    bound = np.sum(bins.count / count * 0.5 / np.sqrt(np.maximum(bins.count, 1)))
    assert bins.ece < bound
    small = reliability(probs[:400], labels[:400])
    assert small.ece > bins.ece


def test_errors_do_not_depend_on_the_order_of_examples() -> None:
    probs, labels = predictions(4)
    order = np.random.default_rng(1).permutation(len(labels))
    assert ece(probs[order], labels[order]) == pytest.approx(ece(probs, labels), rel=1e-12)
    assert mce(probs[order], labels[order]) == pytest.approx(mce(probs, labels), rel=1e-12)


def test_the_largest_error_is_at_least_the_expected_one() -> None:
    probs, labels = predictions(4)
    assert 0 < ece(probs, labels) < mce(probs, labels) <= 1
