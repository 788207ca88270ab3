"""Arrays of the simulation study: standardised from the seventh column on, and files that are others refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.errors import DataError
from bnncli.experiments.simulation_study import prepare


def written(folder: Path, rows: int = 2000) -> dict[str, Path]:
    generator = np.random.default_rng(0)
    columns = np.round(generator.normal(3, 2, size=(rows, 20)), 3)
    np.savetxt(folder / "x.txt", columns, delimiter=",")
    np.savetxt(folder / "y.txt", generator.integers(0, 2, rows), fmt="%d")
    return {"columns": folder / "x.txt", "response": folder / "y.txt"}


def test_columns_from_the_seventh_on_are_standardised(tmp_path: Path) -> None:
    inputs = written(tmp_path)
    arrays = prepare(inputs, {})
    raw = np.loadtxt(inputs["columns"], delimiter=",")
    np.testing.assert_allclose(arrays["features_train"][:, :6], raw[:, :6], rtol=1e-6)
    np.testing.assert_allclose(arrays["features_train"][:, 6:].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(arrays["features_train"][:, 6:].std(axis=0, ddof=1), 1, rtol=1e-5)
    assert arrays["labels_train"].tolist() == np.loadtxt(inputs["response"]).tolist()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected \(2000, 20\) columns"):
        prepare(written(tmp_path, rows=30), {})
    (tmp_path / "x.txt").write_text("a,b\n")
    with pytest.raises(DataError, match="expected comma-separated numbers"):
        prepare({"columns": tmp_path / "x.txt", "response": tmp_path / "y.txt"}, {})
