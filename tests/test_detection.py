"""Out-of-distribution scores against scikit-learn, brute force and known cases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_curve

from bnncli.evaluation.detection import auroc, confidence, fpr95
from bnncli.evaluation.rows import detection_rows


def with_confidence(values: NDArray) -> NDArray:
    """Two-class probabilities whose largest is the given value, at least one half."""
    return np.column_stack([values, 1 - np.asarray(values)])


def random_pair(seed: int = 0) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(seed)
    sharp = generator.dirichlet(np.full(4, 0.2), size=101).round(2)
    flat = generator.dirichlet(np.full(4, 0.8), size=67).round(2)
    return sharp, flat


def test_auroc_is_the_share_of_pairs_in_the_right_order_with_ties_half() -> None:
    probs_in, probs_out = random_pair()
    difference = probs_in.max(axis=1)[:, None] - probs_out.max(axis=1)
    assert (difference == 0).any()
    expected = (difference > 0).mean() + 0.5 * (difference == 0).mean()
    assert auroc(probs_in, probs_out) == pytest.approx(expected, rel=1e-12)


def test_swapping_the_splits_gives_the_complement_of_auroc() -> None:
    probs_in, probs_out = random_pair()
    assert auroc(probs_in, probs_out) + auroc(probs_out, probs_in) == pytest.approx(1, rel=1e-12)


def test_fpr95_is_the_loop_at_the_interpolated_percentile() -> None:
    probs_in, probs_out = random_pair()
    ordered = sorted(probs_in.max(axis=1))
    position = 0.05 * (len(ordered) - 1)
    below, above = ordered[int(position)], ordered[int(position) + 1]
    threshold = below + (position - int(position)) * (above - below)
    expected = sum(row.max() >= threshold for row in probs_out) / len(probs_out)
    assert 0 < expected < 1
    assert fpr95(probs_in, probs_out) == expected


def test_fpr95_lies_on_the_roc_curve_where_95_percent_are_accepted() -> None:
    generator = np.random.default_rng(1)
    scores_in, scores_out = generator.beta(6, 2, 1001) / 2 + 0.5, generator.beta(3, 3, 700) / 2 + 0.5
    is_in = np.repeat([1, 0], [1001, 700])
    false, true, _ = roc_curve(is_in, np.concatenate([scores_in, scores_out]), drop_intermediate=False)
    measured = fpr95(with_confidence(scores_in), with_confidence(scores_out))
    assert measured == pytest.approx(false[np.argmax(true >= 0.95)], abs=1 / 700)


def test_identical_splits_cannot_be_told_apart() -> None:
    probs = with_confidence(np.random.default_rng(2).uniform(0.5, 1, 1000))
    assert auroc(probs, probs) == pytest.approx(0.5, abs=1e-12)
    assert fpr95(probs, probs) == 0.95


def test_separated_splits_are_told_apart_without_error() -> None:
    probs_in, probs_out = with_confidence(np.linspace(0.9, 1, 50)), with_confidence(np.linspace(0.5, 0.8, 40))
    assert (auroc(probs_in, probs_out), fpr95(probs_in, probs_out)) == (1.0, 0.0)


def test_saturated_scores_accept_everything() -> None:
    sure = np.tile(np.array([1, 0], dtype=np.float32), (30, 1))
    assert (auroc(sure, sure), fpr95(sure, sure)) == (0.5, 1.0)


def test_only_the_largest_probability_counts() -> None:
    probs_in, probs_out = random_pair()
    assert fpr95(probs_in[:, ::-1], probs_out) == fpr95(probs_in, probs_out)
    np.testing.assert_array_equal(confidence(np.array([[0.2, 0.8], [0.6, 0.4]])), [0.8, 0.6])


def test_rows_name_the_split_and_the_convention() -> None:
    probs_in, probs_out = random_pair()
    area, rate = detection_rows(probs_in, probs_out, "svhn")
    shared = {"ood": "svhn", "score": "max_prob", "positive": "in"}
    value = auroc(probs_in, probs_out)
    assert area == {"name": "auroc", "value": value, "n": [101, 67], "higher_is_better": True, **shared}
    assert rate.items() >= {**shared, "name": "fpr95", "value": fpr95(probs_in, probs_out)}.items()
    assert rate["threshold"] == "5th percentile of in-distribution scores, linear"
    assert rate["higher_is_better"] is False


@pytest.mark.parametrize(
    ("num_in", "num_out", "reason"),
    [(0, 5, "empty in-distribution split"), (5, 0, "only one class present: split svhn is empty")],
)
def test_an_empty_split_leaves_the_rows_undefined(num_in: int, num_out: int, reason: str) -> None:
    rows = detection_rows(np.full((num_in, 2), 0.5), np.full((num_out, 2), 0.5), "svhn")
    assert [(row["value"], row["undefined"]) for row in rows] == [(None, reason)] * 2
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
