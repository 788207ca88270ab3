"""Posterior files: one metadata key, the same bytes each time, nothing accepted that was not written by us."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from bnncli.artifacts.posteriors import read_posterior, tensor_shapes, write_posterior
from bnncli.artifacts.provenance import build_provenance
from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.parameters.prior import Prior

pytestmark = pytest.mark.core

TENSORS = {"mean": torch.arange(6, dtype=torch.float64), "half": torch.ones(2, 3).half(), "n": torch.tensor([3])}
META = {"type": "point", "note": "é"}


def write(path: Path, tensors: dict[str, Tensor] = TENSORS, meta: dict[str, Any] = META) -> str:
    provenance = build_provenance(
        path, command=["bnncli", "x"], params={}, algo_rev=1, inputs=[], checkpoint=None,
        environment={}, seconds=0.0, warnings=[],
    )  # fmt: skip
    return write_posterior(path, tensors, meta=meta, provenance=provenance, may_replace=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(path: Path, header: str, body: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + body)


def test_what_was_written_is_read(path: Path) -> None:
    tensors, header = read_posterior(path)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in TENSORS.items()}
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert header.meta == META
    assert tensor_shapes(path) == {"half": "F16 (2, 3)", "mean": "F64 (6,)", "n": "I64 (1,)"}


def test_anybody_can_read_it_and_finds_one_metadata_key_of_canonical_json(path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("mean"), TENSORS["mean"])
    assert list(metadata) == ["bnncli"]
    assert canonical_json(json.loads(metadata["bnncli"])) == metadata["bnncli"]


def test_the_digest_can_be_computed_from_the_description_of_the_format(path: Path) -> None:
    _, header = read_posterior(path)
    described = torch.tensor(list(b'{"note":"\xc3\xa9","type":"point"}'), dtype=torch.uint8)
    assert header.content_digest == tensor_digest({**TENSORS, "//description": described})


def test_strided_and_shared_tensors_are_stored_as_they_look(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    write(tmp_path / "x", {"turned": matrix.T, "row": matrix[1], "whole": matrix})
    tensors, _ = read_posterior(tmp_path / "x")
    assert torch.equal(tensors["turned"], matrix.T)
    assert torch.equal(tensors["row"], matrix[1])


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", {"mean": torch.tensor([1.0, float("nan")])})
    with pytest.raises(DataError, match="'mean' has values that are not finite"):
        read_posterior(tmp_path / "x")


@pytest.mark.parametrize(
    ("stated", "stored"),
    [
        (Prior(5.0), None),
        (None, Prior(5.0)),
        (Prior(5.0), Prior(5.1)),
        (Prior(5.0, 2.0), Prior(5.0)),
        (Prior(5.0), Prior(5.0, 2.0)),
        (Prior(5.0, 2.0), Prior(5.0, 2.0)),
        (Prior(5.0), Prior(5.0)),
        (None, None),
    ],
)
def test_header_and_tensors_share_the_prior(tmp_path: Path, stated: Prior | None, stored: Prior | None) -> None:
    tensors, meta = (stored.to_tensors() if stored else {}), (stated.to_meta() if stated else {})
    write(tmp_path / "x", TENSORS | tensors, META | meta)
    if stated == stored:
        assert Prior.found_in(read_posterior(tmp_path / "x")[0]) == stored
        return
    with pytest.raises(
        DataError, match=re.escape(f"precision {stated or 'none'}, but its tensors have {stored or 'none'}")
    ) as told:
        read_posterior(tmp_path / "x")
    assert (told.value.code, told.value.hint) == ("damaged", DAMAGED_HINT)


@pytest.mark.parametrize("meta", [{"prior_precision": -1}, {"prior_precision": "5"}, {"prior_precision": True}])
def test_a_header_whose_prior_is_none_is_refused(tmp_path: Path, meta: dict[str, Any]) -> None:
    write(tmp_path / "x", TENSORS | Prior(5.0).to_tensors(), META | meta)
    with pytest.raises(DataError, match=r"x is damaged: (weight|prior)_precision must be"):
        read_posterior(tmp_path / "x")


def test_a_name_that_stands_twice_is_refused(path: Path) -> None:
    header, body = header_of(path)
    text = json.dumps(header)
    twice = text[:-1] + f', "mean": {json.dumps(header["mean"])}}}'
    put(path, twice, body)
    with pytest.raises(DataError, match="a duplicate key"):
        read_posterior(path)


@pytest.mark.parametrize("entry", [3, "x", {}, {"data_offsets": "ab"}, {"data_offsets": [0]}, {"data_offsets": None}])
def test_a_senseless_tensor_entry_is_refused(path: Path, entry: Any) -> None:
    header, body = header_of(path)
    put(path, json.dumps({**header, "mean": entry}), body)
    with pytest.raises(DataError, match=r"damaged|truncated"):
        read_posterior(path)


@pytest.mark.parametrize("header", ["[]", "{}", '{"__metadata__": 3}', '{"__metadata__": {"bnncli": "[]"}}', "{"])
def test_a_header_that_is_not_ours_is_refused(path: Path, header: str) -> None:
    put(path, header, b"")
    with pytest.raises(DataError, match=r"not a bnncli artifact|damaged|not JSON"):
        read_posterior(path)


def test_a_header_length_beyond_the_file_is_refused_before_it_is_read(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**63) + b"{" + bytes(100))
    with pytest.raises(DataError, match="truncated"):
        read_posterior(path)


def test_bytes_after_the_last_tensor_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match="truncated"):
        read_posterior(path)
