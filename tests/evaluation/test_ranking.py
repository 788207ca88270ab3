"""Sets of the most probable classes against loops, and against top-k accuracy where all sets have one size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import top_k_accuracy_score

from bnncli.evaluation import statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import largest_probabilities, ranking_scores
from bnncli.evaluation.statistics import Row, examples_of, score_rows

RANKING = {"rule": "best", "threshold": 0.05, "cap": 5}


def predictions(num_classes: int = 8, count: int = 300) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)
    return probs, (probs.cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(max=num_classes - 1)


def rows_of(probs: NDArray, labels: NDArray | None, lengths: NDArray | None, **keywords: Any) -> dict[str, Row]:
    scores = ranking_scores(probs, examples_of(probs, labels), lengths, None if lengths is None else RANKING)
    return {row["name"]: row for row in score_rows(scores, ("test", len(probs)), **keywords)}


def test_the_ranking_is_right_where_the_label_is_among_the_classes_kept() -> None:
    probs, labels = predictions()
    lengths = np.random.default_rng(1).integers(1, 6, size=300)
    rows = rows_of(probs, labels, lengths)
    kept = [list(np.argsort(-row, kind="stable")[:size]) for row, size in zip(probs, lengths, strict=True)]
    hits = [label in classes for label, classes in zip(labels, kept, strict=True)]
    assert rows["ranked_accuracy"]["value"] == pytest.approx(np.mean(hits), rel=1e-12)
    assert rows["ranked_length"]["value"] == pytest.approx(lengths.mean(), rel=1e-12)
    assert rows["ranked_accuracy"].items() >= RANKING.items()


def test_the_plain_rule_keeps_as_many_classes_by_one_threshold() -> None:
    probs, labels = predictions()
    lengths = np.repeat([1, 3], 150)
    rows = rows_of(probs, labels, lengths)
    sums = -np.sort(-probs.astype(float), axis=1).cumsum(axis=1)

    def sizes(threshold: float) -> NDArray:
        return np.minimum(1 + (sums < threshold).sum(axis=1), 5)

    # Sizes change where the threshold passes one of the sums.
    threshold = next(t for t in np.sort(sums, axis=None) + 1e-12 if sizes(t).mean() >= lengths.mean())
    assert sizes(threshold).mean() == pytest.approx(2, abs=1 / 300)
    rank = examples_of(probs, labels).label_rank
    expected = np.mean(rank < sizes(threshold))
    assert rows["cumulative_accuracy"]["value"] == pytest.approx(expected, abs=1.01 / 300)
    gain = rows["ranked_accuracy"]["value"] - rows["cumulative_accuracy"]["value"]
    assert rows["ranked_gain"]["value"] == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("size", [1, 5])
def test_the_shortest_and_the_longest_sets_are_top_k_by_either_rule(size: int) -> None:
    probs, labels = predictions()
    rows = rows_of(probs, labels, np.full(300, size))
    expected = top_k_accuracy_score(labels, probs, k=size, labels=range(8))
    assert rows["ranked_accuracy"]["value"] == pytest.approx(expected, rel=1e-12)
    assert rows["cumulative_accuracy"]["value"] == pytest.approx(expected, rel=1e-12)
    assert rows["ranked_gain"]["value"] == 0


def test_the_gain_is_resampled_in_pairs() -> None:
    probs, labels = predictions()
    rows = rows_of(probs, labels, np.repeat([1, 3], 150), bootstrap=Bootstrap(1000))
    apart = np.hypot(rows["ranked_accuracy"]["standard_error"], rows["cumulative_accuracy"]["standard_error"])
    assert 0 < rows["ranked_gain"]["standard_error"] < apart


def test_without_a_ranking_or_labels_the_reason_is_told() -> None:
    probs, labels = predictions()
    assert {row["undefined"] for row in rows_of(probs, labels, None).values()} == {
        "the predictions have no ranking; create one with predict \0top_k\0"
    }
    rows = rows_of(probs, None, np.ones(300, dtype=int))
    assert rows["ranked_length"]["value"] == 1
    assert rows["ranked_gain"]["undefined"] == "no labels"
    empty = rows_of(probs[:0], labels[:0], np.ones(0, dtype=int))
    assert {row["undefined"] for row in empty.values()} == {"empty split"}


def test_the_largest_probabilities_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, _ = predictions()
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 8 * 7)
    np.testing.assert_array_equal(largest_probabilities(probs, 3), -np.sort(-probs.astype(float), axis=1)[:, :3])
