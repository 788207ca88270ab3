"""Large arrays of npz files stay in their file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnncli.data import arrays
from bnncli.data.arrays import read_npz
from bnncli.data.splits import load_split
from bnncli.errors import DataError

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrays, "MAPPED_BYTES", 1)
    monkeypatch.chdir(tmp_path)


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_an_array_that_lies_as_it_is_is_mapped_and_others_are_read() -> None:
    np.savez("plain.npz", x=ROWS, y=np.arange(6))
    np.savez_compressed("packed.npz", x=ROWS)
    np.savez("columns.npz", x=np.asfortranarray(ROWS))
    for name, is_there in (("plain", True), ("packed", False), ("columns", False)):
        found = read_npz(Path(f"{name}.npz"), ["x"])["x"]
        np.testing.assert_array_equal(found, ROWS)
        assert is_mapped(found) == is_there
    split = load_split("npz:plain.npz")
    assert is_mapped(split.dataset.inputs)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(next(split.batches(4)).inputs.numpy(), ROWS[:4])  # type: ignore[union-attr]


def test_a_changed_byte_is_told_before_anything_is_mapped() -> None:
    np.savez("plain.npz", x=ROWS)
    raw = bytearray(Path("plain.npz").read_bytes())
    raw[raw.index(ROWS.tobytes()) + 5] ^= 1
    Path("plain.npz").write_bytes(raw)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_npz(Path("plain.npz"), ["x"])
