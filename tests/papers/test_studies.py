"""Arrays that studies prepare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.errors import DataError
from bnncli.papers.studies import random_rows, simulated_rows


def test_rows_are_different_ones_with_their_labels_and_of_every_class(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(10), 200)
    np.savez(tmp_path / "x.npz", x=np.arange(2000)[:, None], y=labels)
    found = random_rows("quick", {"test": tmp_path / "x.npz"})
    rows = np.concatenate([found["x_val"], found["x_test"]]).ravel()
    assert len({*rows.tolist()}) == 1000
    assert np.array_equal(np.concatenate([found["y_val"], found["y_test"]]), labels[rows])
    # 50 of each of ten classes are expected: five standard deviations of the hypergeometric.
    assert np.abs(np.bincount(found["y_test"], minlength=10) - 50).max() < 29


def test_too_few_rows_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((5, 2)), y=np.zeros(5, np.int64))
    with pytest.raises(DataError, match="at least 1000 rows, got 5"):
        random_rows("quick", {"test": tmp_path / "x.npz"})


def written(folder: Path, rows: int = 2000) -> dict[str, Path]:
    generator = np.random.default_rng(0)
    columns = np.round(generator.normal(3, 2, size=(rows, 20)), 3)
    np.savetxt(folder / "x.txt", columns, delimiter=",")
    np.savetxt(folder / "y.txt", generator.integers(0, 2, rows), fmt="%d")
    return {"columns": folder / "x.txt", "response": folder / "y.txt"}


def test_columns_from_the_seventh_on_are_standardised(tmp_path: Path) -> None:
    inputs = written(tmp_path)
    arrays = simulated_rows("quick", inputs)
    raw = np.loadtxt(inputs["columns"], delimiter=",")
    np.testing.assert_allclose(arrays["features_train"][:, :6], raw[:, :6], rtol=1e-6)
    np.testing.assert_allclose(arrays["features_train"][:, 6:].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(arrays["features_train"][:, 6:].std(axis=0, ddof=1), 1, rtol=1e-5)
    assert arrays["labels_train"].tolist() == np.loadtxt(inputs["response"]).tolist()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected \(2000, 20\) columns"):
        simulated_rows("quick", written(tmp_path, rows=30))
    (tmp_path / "x.txt").write_text("a,b\n")
    with pytest.raises(DataError, match="expected comma-separated numbers"):
        simulated_rows("quick", {"columns": tmp_path / "x.txt", "response": tmp_path / "y.txt"})
