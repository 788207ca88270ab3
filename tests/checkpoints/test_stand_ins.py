"""What is no code beside the weights: numbers and arrays of NumPy, paths; none of their classes is made."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from bnncli.errors import DataError
from bnncli.models.checkpoint_files import STAND_INS, Array, NumberType, number
from bnncli.models.checkpoints import load_checkpoint, load_whole

STATE = {"fc.weight": torch.ones(2, 3)}
NUMBERS = (
    np.float64(0.9), np.float32(3), np.float16(2), np.int64(-7), np.uint8(200), np.bool_(True), np.array([1.5], ">f4")[0]
)  # fmt: skip


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "legacy"])
def test_numbers_paths_and_arrays_stand_beside_the_weights(tmp_path: Path, is_new: bool) -> None:
    saved = {
        "state_dict": STATE, "numbers": NUMBERS, "places": [Path("/a/b.c"), PurePosixPath("d/e")],
        "arrays": [np.arange(3.0), np.random.default_rng(0).bit_generator.state["state"], np.array([None])],
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
    checkpoint, found = load_whole(tmp_path / "a.pt")
    assert torch.equal(checkpoint.state["fc.weight"], STATE["fc.weight"])
    assert found["numbers"] == tuple(one.item() for one in NUMBERS)
    assert [type(one) for one in found["numbers"]] == [type(one.item()) for one in NUMBERS]
    assert found["places"] == ["/a/b.c", "d/e"]
    assert isinstance(found["arrays"][0], Array)


def test_an_array_of_numpy_is_no_weight(tmp_path: Path) -> None:
    torch.save({**STATE, "bias": np.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="'bias' is Array, expected a tensor"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["O", "V8", "U3", "M8[s]", "f8,f8", "|O", "f3", "../f8", ""])
def test_a_forged_number_is_no_number_and_makes_nothing(name: str) -> None:
    kind = NumberType(name)
    kind.__setstate__((3, "<", None))
    assert math.isnan(number(kind, bytes(8)))
    assert math.isnan(number(NumberType("f8"), "text"))  # type: ignore[arg-type]


def test_the_names_are_those_that_pickles_have() -> None:
    class Named(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert f"{module}.{name}" in STAND_INS
            return STAND_INS[f"{module}.{name}"]

    saved = pickle.dumps((np.float64(0.5), Path("a/b"), np.arange(2)))
    half, place, _ = Named(io.BytesIO(saved)).load()
    assert (half, place) == (0.5, "a/b")
