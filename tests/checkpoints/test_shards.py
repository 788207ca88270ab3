"""Checkpoints in several files: shards with an index, as Hugging Face's libraries save them, and what can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from safetensors.torch import save_file
from torch import Tensor

from bnncli.artifacts.files import read_header
from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.models.build import load_network
from bnncli.models.checkpoints import load_checkpoint
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics.digests import tensor_digest

STATE = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


def save_shards(
    folder: Path, state: dict[str, Tensor], suffix: str = "safetensors", *, is_indexed: bool = True
) -> Path:
    """A shard for each tensor; the index, where one is written."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for place, (name, tensor) in enumerate(state.items(), start=1):
        weight_map[name] = f"model-{place:05}-of-{len(state):05}.{suffix}"
        if suffix == "safetensors":
            save_file({name: tensor.contiguous()}, folder / weight_map[name])
        else:
            torch.save({name: tensor}, folder / weight_map[name])
    index = folder / f"model.{suffix}.index.json"
    if is_indexed:
        index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_as_one_checkpoint(tmp_path: Path, suffix: str, is_indexed: bool) -> None:
    index = save_shards(tmp_path / "net", STATE, suffix, is_indexed=is_indexed)
    for place in (tmp_path / "net", index) if is_indexed else (tmp_path / "net",):
        checkpoint = load_checkpoint(place)
        assert checkpoint.weights_digest == tensor_digest(STATE)
        assert checkpoint.format == ("safetensors-shards" if suffix == "safetensors" else "torch-zip-shards")
        assert checkpoint.file_sha256 == checkpoint_sha256(place)


def test_one_shard_alone_is_told_of_the_folder(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE)
    with pytest.raises(DataError, match="one of 2 shards of a checkpoint") as caught:
        load_checkpoint(tmp_path / "model-00001-of-00002.safetensors")
    assert caught.value.hint == f"give the folder: {tmp_path}"


def test_shards_that_are_missing_are_named(tmp_path: Path) -> None:
    index = save_shards(tmp_path, STATE)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(MissingInput, match=r"is missing 1 of its 2 shards: 'model-00002-of-00002.safetensors'"):
            load_checkpoint(tmp_path)
        index.unlink(missing_ok=True)


BAD_INDEXES = {
    "lists no shards": '{"weight_map": {}}',
    "expected a weight_map": '["model-00001-of-00002.safetensors"]',
    "outside its folder": '{"weight_map": {"0.bias": "../model.safetensors"}}',
    r"'0.weight' is in 'model-00001-of-00002.safetensors', but the index says 'no file'": (
        '{"weight_map": {"0.bias": "model-00002-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"}}'
    ),
}


@pytest.mark.parametrize("message", BAD_INDEXES)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, message: str) -> None:
    save_shards(tmp_path, STATE).write_text(BAD_INDEXES[message])
    with pytest.raises(DataError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert caught.value.code == "bad_index"


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE, is_indexed=False)
    save_file(STATE, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(DataError, match=r"'0.weight' is in both 'model-00001-of-00002.safetensors' and"):
        load_checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder_have_to_be_chosen_from(tmp_path: Path) -> None:
    index = save_shards(tmp_path, STATE)
    index.with_name("other.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(DataError, match="holds 2 sharded checkpoints") as caught:
        load_checkpoint(tmp_path)
    assert caught.value.hint == f"give one index: {index}"
    assert load_checkpoint(index).weights_digest == tensor_digest(STATE)


def test_a_shard_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE, "bin", is_indexed=False)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model-00002-of-00002.bin")
    with pytest.raises(Untrusted, match=r"model-00002-of-00002.bin': loading this file would run code"):
        load_checkpoint(tmp_path)


def test_a_run_of_shards_is_extracted_fitted_and_known_again(cli: Cli, tmp_path: Path) -> None:
    network = load_network("mlp", {"inputs": "4", "hidden": "5", "classes": "3"}, None)
    save_shards(tmp_path / "net", network.state_dict())
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(6) % 3)
    words = ["extract-features", tmp_path / "net", "--model", "mlp", "--data", f"train=npz:{tmp_path}/d.npz", "--json"]
    assert cli(*words).json["action"] == "computed"
    assert cli(*words).json["action"] == "up_to_date"
    header = read_header(tmp_path / "net.bnn/features/train.h5")
    assert header.weights_digest == tensor_digest(network.state_dict())
    assert cli("fit-laplace", tmp_path / "net", "--prior-precision", "1").code == 0
    save_shards(tmp_path / "net", {name: tensor + 1 for name, tensor in network.state_dict().items()})
    error = cli("fit-laplace", tmp_path / "net", "--prior-precision", "2", "--json").json["error"]
    assert error["code"] == "wrong_checkpoint"


def test_a_run_opened_in_python_sees_that_a_shard_changed(tmp_path: Path) -> None:
    from bnncli.api.session import _state_of

    save_shards(tmp_path / "net", STATE)
    before = _state_of(tmp_path / "net")
    with open(tmp_path / "net/model-00002-of-00002.safetensors", "ab") as stream:
        stream.write(b" ")
    assert before is not None
    assert _state_of(tmp_path / "net") != before
