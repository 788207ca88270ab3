"""Arrays in files: large ones, and MATLAB's."""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from bnncli.data import arrays as _arrays
from bnncli.data.arrays import read_mat, read_npz
from bnncli.data.splits import load_split
from bnncli.errors import BnnError, DataError

pytestmark = [pytest.mark.core, pytest.mark.libraries]


large = pytest.mark.usefixtures("all_are_large")
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_arrays, "MAPPED_BYTES", 1)
    monkeypatch.chdir(tmp_path)


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@large
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


@large
def test_a_changed_byte_is_told_before_anything_is_mapped() -> None:
    np.savez("plain.npz", x=ROWS)
    raw = bytearray(Path("plain.npz").read_bytes())
    raw[raw.index(ROWS.tobytes()) + 5] ^= 1
    Path("plain.npz").write_bytes(raw)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_npz(Path("plain.npz"), ["x"])


RNG = np.random.default_rng(0)
ARRAYS = {
    "X": RNG.integers(0, 256, (5, 4, 3, 2), dtype=np.uint8),
    "y": np.array([[10], [1]]),
    "small": np.array([[7]], np.uint8),
    "real": RNG.normal(size=(2, 3)),
    "single": RNG.normal(size=(4, 1)).astype(np.float32),
    "negative": np.array([[-3, 300]], np.int16),
    "none": np.zeros((0, 3)),
}
OTHERS = {"text": "a text", "complex": np.array([[1 + 2j]]), "cell": np.array(["a", 1], object), "struct": {"a": 1}}


@pytest.mark.parametrize("is_packed", [False, True])
def test_arrays_are_those_that_scipy_reads(tmp_path: Path, is_packed: bool) -> None:
    savemat(tmp_path / "a.mat", {**OTHERS, **ARRAYS}, do_compression=is_packed)
    found, expected = read_mat(tmp_path / "a.mat", list(ARRAYS)), loadmat(tmp_path / "a.mat")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], expected[name])
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    for name in OTHERS:
        with pytest.raises(DataError, match=f"has no numeric array '{name}'"):
            read_mat(tmp_path / "a.mat", [name])


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_damage_is_an_error_of_ours(tmp_path: Path, is_packed: bool) -> None:
    stream, path = io.BytesIO(), tmp_path / "a.mat"
    savemat(stream, {"y": ARRAYS["y"], "single": ARRAYS["single"]}, do_compression=is_packed)
    whole = stream.getvalue()
    damaged = [whole[:end] for end in range(0, len(whole), 5)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in range(124, len(whole)) for bit in (1, 128)
    ]
    damaged, cut, told = damaged[::3], len(range(0, len(whole), 15)), 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read_mat(path, ["y", "single"])
        except BnnError:
            told += 1
    assert told >= (len(damaged) - 2 if is_packed else cut)  # packed arrays have a checksum
