"""Random rows: all different, as asked for, and the labels are those of the images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.errors import DataError
from bnncli.experiments.random_rows import prepare


def test_rows_are_different_ones_with_their_labels_and_of_every_class(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(10), 50)
    np.savez(tmp_path / "x.npz", x=np.arange(500)[:, None], y=labels)
    found = prepare({"test": tmp_path / "x.npz"}, {"num_val": 100, "num_test": 200})
    rows = np.concatenate([found["x_val"], found["x_test"]]).ravel()
    assert len({*rows.tolist()}) == 300
    assert np.array_equal(np.concatenate([found["y_val"], found["y_test"]]), labels[rows])
    # 20 of each of ten classes are expected: five standard deviations of the hypergeometric.
    assert np.abs(np.bincount(found["y_test"], minlength=10) - 20).max() < 17


def test_too_few_rows_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((5, 2)), y=np.zeros(5, np.int64))
    with pytest.raises(DataError, match="at least 6 rows, got 5"):
        prepare({"test": tmp_path / "x.npz"}, {"num_val": 2, "num_test": 4})
