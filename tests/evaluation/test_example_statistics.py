"""The numbers of each example against loops; blocks of rows give the same bits as all rows at once."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation import statistics
from bnncli.evaluation.statistics import ExampleStatistics, examples_of


def predictions(num_classes: int, *, count: int = 300) -> tuple[NDArray, NDArray]:
    """Float32 predictions with ties, certainties and zeros among them, and labels."""
    generator = np.random.default_rng(num_classes)
    probs = generator.dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)
    probs[:20] = np.eye(num_classes)[np.arange(20) % num_classes]
    probs[20:60] = 1 / num_classes
    return probs, generator.integers(num_classes, size=count)


def vectors(examples: ExampleStatistics) -> dict[str, NDArray]:
    return {
        spec.name: getattr(examples, spec.name)
        for spec in fields(examples)
        if spec.name not in ("num_classes", "of_labels")
    }


@pytest.mark.parametrize("num_classes", [2, 5])
def test_the_numbers_of_each_example_are_those_of_the_loop(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    found = examples_of(probs, labels)
    for n, (row, label) in enumerate(zip(probs.astype(float).tolist(), labels, strict=True)):
        order = sorted(range(num_classes), key=lambda k: (-row[k], k))
        assert found.predicted[n] == order[0]
        assert found.confidence[n] == max(row)
        assert found.label_rank[n] == order.index(label)
        assert found.is_right[n] == (order[0] == label)
        assert found.label_probability[n] == row[label]
        assert found.entropy[n] == pytest.approx(-sum(p * math.log(p) for p in row if p > 0), rel=1e-12, abs=1e-15)
        assert found.squared_norm[n] == pytest.approx(sum(p * p for p in row), rel=1e-12)


def test_blocks_of_a_mapped_file_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs, labels = predictions(5)
    path = tmp_path_factory.mktemp("mapped") / "probs.npy"
    np.save(path, probs)
    whole = vectors(examples_of(probs, labels))
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 5 * 7)
    blocks = vectors(examples_of(np.load(path, mmap_mode="r"), labels))
    for name, values in whole.items():
        assert values.dtype == blocks[name].dtype
        np.testing.assert_array_equal(values, blocks[name])


def test_without_labels_what_needs_them_is_none() -> None:
    found = examples_of(predictions(3)[0])
    assert len(found) == 300
    missing = {name for name, values in vectors(found).items() if values is None}
    assert missing == {"labels", "is_right", "label_probability", "label_rank"}


def test_an_empty_split_has_empty_vectors() -> None:
    found = examples_of(np.empty((0, 4), dtype=np.float32), np.empty(0, dtype=int))
    assert {values.shape for values in vectors(found).values()} == {(0,)}


def test_what_is_no_prediction_is_refused() -> None:
    probs, labels = predictions(3)
    with pytest.raises(DataError, match="expected 0 to 2, got 0 to 3"):
        examples_of(probs, labels + (labels == 2))
    with pytest.raises(DataError, match="sum to 1"):
        examples_of(np.full((2, 3), 0.5))
    with pytest.raises(DataError, match=r"expected shape \(N, 4\)"):
        examples_of(probs, labels, num_classes=4)
