"""Arrays of MATLAB files, against scipy.io; damage is told."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from bnncli.data.arrays import read_mat
from bnncli.errors import BnnError, DataError

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
