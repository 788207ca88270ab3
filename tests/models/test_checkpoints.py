"""Checkpoints: every way people save them, and every way a file can be hostile."""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from safetensors.torch import save as safetensors_bytes
from safetensors.torch import save_model
from torch import nn

from bnncli.commands.demo import fixture_path
from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.models.checkpoints import convert_checkpoint, load_checkpoint
from bnncli.numerics.digests import canonical_json, file_sha256, json_sha256, tensor_digest

pytestmark = [pytest.mark.core, pytest.mark.libraries]

STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([0.5, -0.5])}


class Bomb:
    """Unpickling this makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def write_zip(path: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def repack(source: Path, target: Path, compression: int, extra: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(source) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    return write_zip(target, members + extra, compression)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(tmp_path / "plain.pt", STATE)


WRAPPINGS: dict[str, tuple[Any, str | None]] = {
    "bare": (STATE, None),
    "ordered": (collections.OrderedDict(STATE), None),
    "state_dict": ({"epoch": 3, "state_dict": STATE, "optimizer": {"state": {}}}, "state_dict"),
    "model": ({"model": STATE, "optimizer": {"state": {}}}, "model"),
    "nested": ({"net": {"state_dict": STATE}, "best": 0.9}, "net.state_dict"),
    "ema first": ({"state_dict": {"x": torch.ones(1)}, "state_dict_ema": STATE}, "state_dict_ema"),
    "own word": ({"my_network": STATE, "epoch": 3}, "my_network"),
    "namespace": ({"state_dict": STATE, "args": argparse.Namespace(lr=0.1)}, "state_dict"),
    "parameters": ({name: nn.Parameter(tensor) for name, tensor in STATE.items()}, None),
}


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_state_dict_is_found_however_it_was_saved(tmp_path: Path, wrapping: str, is_new: bool) -> None:
    saved, key = WRAPPINGS[wrapping]
    path = save(tmp_path / "x.safetensors", saved, _use_new_zipfile_serialization=is_new)
    checkpoint = load_checkpoint(path)
    assert checkpoint.format == ("torch-zip" if is_new else "torch-legacy")
    assert checkpoint.selected_key == key
    assert checkpoint.state.keys() == STATE.keys()
    assert all(torch.equal(checkpoint.state[name], STATE[name]) for name in STATE)
    assert checkpoint.weights_digest == tensor_digest(STATE)
    assert not any(tensor.requires_grad for tensor in checkpoint.state.values())


def test_picking_averaged_weights_is_noted(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", WRAPPINGS["ema first"][0])
    assert load_checkpoint(path).notes == ("using the averaged weights 'state_dict_ema', not the raw ones",)


def test_a_safetensors_file_keeps_the_identity_of_the_torch_file(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "x.pt").write_bytes(safetensors_bytes(STATE))
    checkpoint = load_checkpoint(tmp_path / "x.pt")
    assert checkpoint.format == "safetensors"
    assert checkpoint.weights_digest == load_checkpoint(plain).weights_digest
    assert checkpoint.file_sha256 != load_checkpoint(plain).file_sha256
    assert checkpoint.file_sha256 == hashlib.sha256((tmp_path / "x.pt").read_bytes()).hexdigest()


PREFIXES = {
    "module.": ("module.",),
    "_orig_mod.module.": ("_orig_mod.", "module."),
    "module._orig_mod.module.": ("module.", "_orig_mod.", "module."),
    "module.model.": ("module.", "model."),
    "net.": ("net.",),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wrapper_prefixes_go_to_a_fixpoint_and_are_recorded(tmp_path: Path, prefix: str) -> None:
    path = save(tmp_path / "a.pt", {prefix + name: tensor for name, tensor in STATE.items()})
    checkpoint = load_checkpoint(path)
    assert checkpoint.state.keys() == STATE.keys()
    assert checkpoint.stripped_prefixes == PREFIXES[prefix]
    assert checkpoint.weights_digest == tensor_digest(STATE)


def test_a_prefix_that_not_all_names_have_stays(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"model.w": torch.ones(2), "module.v": torch.ones(2), "head.w": torch.ones(2)})
    checkpoint = load_checkpoint(path)
    assert set(checkpoint.state) == {"model.w", "module.v", "head.w"}
    assert checkpoint.stripped_prefixes == ()


def test_compiled_inner_layers_lose_their_prefix(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"body._orig_mod.w": torch.ones(2), "head.w": torch.ones(2)})
    assert set(load_checkpoint(path).state) == {"body.w", "head.w"}


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(2)})
    with pytest.raises(DataError, match="same name after removing wrapper prefixes"):
        load_checkpoint(path)


def test_an_averaged_model_loses_its_counter(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2)).state_dict())
    checkpoint = load_checkpoint(path)
    assert set(checkpoint.state) == {"weight", "bias"}
    assert "AveragedModel" in checkpoint.notes[0]


def test_half_precision_is_kept_in_the_state(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones(3).half()})
    assert [tensor.dtype for tensor in load_checkpoint(path).state.values()] == [torch.bfloat16, torch.float16]


def test_the_digest_is_the_documented_stream_of_bytes() -> None:
    tensors = {"b": torch.tensor([[1, 2]], dtype=torch.int16), "a": torch.tensor(1.5)}
    stream = b'["a","float32",[]]\n' + struct.pack("<f", 1.5) + b'["b","int16",[1,2]]\n' + struct.pack("<2h", 1, 2)
    assert tensor_digest(tensors) == "bnn-sha256/1:" + hashlib.sha256(stream).hexdigest()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
def test_numpy_torch_byte_order_and_strides_do_not_change_the_digest(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    forms: list[Any] = [
        torch.from_numpy(array),
        torch.from_numpy(array.T.copy()).T,
        array.astype(array.dtype.newbyteorder(">")),
    ]
    digests = {tensor_digest({"x": form}) for form in (array, np.asfortranarray(array), *forms)}
    assert len(digests) == 1


def test_name_type_shape_and_value_each_change_the_digest() -> None:
    ones = torch.ones(4)
    others = [{"y": ones}, {"x": ones.double()}, {"x": ones.view(2, 2)}, {"x": ones * 2}, {"x": ones, "z": ones[:0]}]
    digests = {tensor_digest(other) for other in [{"x": ones}, *others]}
    assert len(digests) == 6


def test_strings_have_a_digest_whatever_array_holds_them() -> None:
    texts = ["été", "a,b"]
    assert tensor_digest({"x": np.array(texts)}) == tensor_digest({"x": np.array(texts, dtype=object)})
    assert tensor_digest({"x": np.array(texts)}) != tensor_digest({"x": np.array(['été","a', "b"])})


def test_canonical_json_is_sorted_compact_and_without_nan() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'
    assert json_sha256({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_the_file_digest_covers_every_byte_of_a_long_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes((1 << 23) + 17)
    (tmp_path / "long").write_bytes(data)
    assert file_sha256(tmp_path / "long") == hashlib.sha256(data).hexdigest()


def test_a_bomb_is_refused_with_its_name_and_nothing_runs(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    path = save(tmp_path / "bomb.pt", {"state_dict": STATE, "x": Bomb(target)})
    with pytest.raises(Untrusted, match=r"posix\.mkdir") as caught:
        load_checkpoint(path)
    assert not target.exists()
    command = f"bnncli convert {path} {path.with_suffix('.safetensors')} --trust-pickle"
    assert caught.value.hint == f"if you trust this file, run: {command}"
    assert "\x1b" not in caught.value.message


def test_a_bomb_in_the_old_format_is_refused_with_its_name(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    path = save(tmp_path / "bomb.pt", {"x": Bomb(target)}, _use_new_zipfile_serialization=False)
    with pytest.raises(Untrusted, match=r"posix\.mkdir"):
        load_checkpoint(path)
    assert not target.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_raw_pickle_is_never_loaded(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "ran"
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Bomb(target), protocol))
    with pytest.raises(Untrusted, match=r"raw pickle.*posix\.mkdir"):
        load_checkpoint(tmp_path / "a.pt")
    assert not target.exists()


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "legacy"])
def test_a_pickled_module_needs_trust_and_then_gives_its_tensors(tmp_path: Path, is_new: bool) -> None:
    module = nn.Linear(3, 2)
    path = save(tmp_path / "whole.pt", module, _use_new_zipfile_serialization=is_new)
    with pytest.raises(Untrusted, match=r"torch\.nn\.modules\.linear\.Linear"):
        convert_checkpoint(path, trust_pickle=False)
    state = convert_checkpoint(path, trust_pickle=True)
    assert torch.equal(state["weight"], module.weight)


def test_a_trusted_raw_pickle_of_a_state_dict_is_converted(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"state_dict": STATE}))
    state = convert_checkpoint(tmp_path / "a.pkl", trust_pickle=True)
    assert torch.equal(state["fc.bias"], STATE["fc.bias"])


PROGRAMS = {
    "TorchScript": [("m/data.pkl", b"x"), ("m/code/__torch__.py", b"x"), ("m/constants.pkl", b"x")],
    "exported program": [("m/archive_format", b"pt2"), ("m/models/model.json", b"{}")],
    r"torch\.package": [("m/.data/extern_modules", b""), ("m/p/x.pkl", b"x")],
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("trust", [False, True])
def test_programs_are_refused_as_code(tmp_path: Path, kind: str, trust: bool) -> None:
    path = write_zip(tmp_path / "a.pt", PROGRAMS[kind])
    with pytest.raises(Untrusted, match=kind):
        convert_checkpoint(path, trust_pickle=trust)


@pytest.mark.parametrize("trust", [False, True])
def test_one_ranks_part_of_a_network_is_told(tmp_path: Path, trust: bool) -> None:
    path = write_zip(tmp_path / "a.pt", [("m/data.pkl", b"\x80\x02ctorch.distributed.tensor\nDTensor\n.")])
    with pytest.raises(DataError, match=r"one rank's shards of a distributed network.*\(DTensor\)") as told:
        convert_checkpoint(path, trust_pickle=trust)
    assert "torch.distributed.checkpoint" in str(told.value.hint)


def test_a_real_torchscript_file_is_recognised(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of which category the deprecation is, depends on torch's release
        torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3)).save(str(tmp_path / "a.pt"))
    with pytest.raises(Untrusted, match="TorchScript"):
        load_checkpoint(tmp_path / "a.pt")


WRONG_FILES = {
    "empty": b"", "git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
    "web page": b"\n<!DOCTYPE html><html>login</html>", "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "NumPy array": b"\x93NUMPY\x01\x00" + bytes(100), "gzip": b"\x1f\x8b\x08" + bytes(100),
    "neither a torch nor a safetensors": b"hello" * 100,
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_every_wrong_kind_of_file_has_its_own_message(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.pt").write_bytes(WRONG_FILES[kind])
    with pytest.raises(DataError, match=kind):
        load_checkpoint(tmp_path / "a.pt")


def test_an_npz_file_is_named_as_such(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    with pytest.raises(DataError, match="npz archive"):
        load_checkpoint(tmp_path / "a.npz")


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, form: str, fraction: float) -> None:
    path = save(tmp_path / "a.pt", {"w": torch.ones(500)}, _use_new_zipfile_serialization=form == "zip")
    data = safetensors_bytes({"w": torch.ones(500)}) if form == "safetensors" else path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(DataError, match=r"truncated|header claims") as caught:
        load_checkpoint(path)
    assert caught.value.code == "truncated"


def test_no_flipped_byte_ends_in_a_foreign_exception(tmp_path: Path, plain: Path) -> None:
    data = bytearray(plain.read_bytes())
    outcomes = set()
    for position in range(0, len(data), 7):
        damaged = data.copy()
        damaged[position] ^= 0x5A
        (tmp_path / "b.pt").write_bytes(damaged)
        try:
            outcomes.add(type(load_checkpoint(tmp_path / "b.pt").state).__name__)
        except (DataError, Untrusted) as error:
            outcomes.add(type(error).__name__)
    assert "DataError" in outcomes


def test_places_that_hold_no_file_are_missing_inputs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, words in [
        ("none.pt", "no file"),
        (".", "is a folder"),
        ("pipe", "is a pipe"),
        ("n" * 300, "cannot read"),
    ]:
        with pytest.raises(MissingInput, match=words):
            load_checkpoint(tmp_path / place)
    with pytest.raises(MissingInput, match="is a pipe, socket or device"):
        load_checkpoint("/dev/null")


def test_deflated_members_are_refused(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(DataError, match="is compressed"):
        load_checkpoint(repack(plain, tmp_path / "a.pt", zipfile.ZIP_DEFLATED, []))


def test_members_outside_the_archive_are_refused(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(DataError, match="points outside the archive"):
        load_checkpoint(repack(plain, tmp_path / "a.pt", zipfile.ZIP_STORED, [("archive/../../evil", b"x")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_that_are_there_twice_are_refused(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(DataError, match=r"data\.pkl' appears twice"):
        load_checkpoint(repack(plain, tmp_path / "a.pt", zipfile.ZIP_STORED, [("plain/data.pkl", b"x")]))


def test_members_that_claim_more_than_the_file_holds_are_refused(tmp_path: Path, plain: Path) -> None:
    data = bytearray(plain.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(DataError, match="zip members claim"):
        load_checkpoint(tmp_path / "a.pt")


def safetensors_file(path: Path, header: str, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + data)
    return path


def test_tied_weights_that_save_model_stored_once_have_all_their_names(tmp_path: Path, cli: Cli) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    net[2].weight = net[0].weight
    save_model(net, tmp_path / "x.safetensors", metadata={"made by": "us", "format": "pt"})
    torch.save(net.state_dict(), tmp_path / "x.pt")
    whole, tied = (load_checkpoint(tmp_path / name) for name in ("x.pt", "x.safetensors"))
    assert tied.state.keys() == whole.state.keys() == net.state_dict().keys()
    assert tied.weights_digest == whole.weights_digest
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\n"
        "    net[2].weight = net[0].weight\n    return net\n"
    )
    np.savez(tmp_path / "x.npz", x=np.ones((5, 4), np.float32), y=np.arange(5) % 4)
    words = ("--model", f"{tmp_path}/net.py:make", "--data", f"train=npz:{tmp_path}/x.npz")
    assert cli("extract-features", tmp_path / "x.safetensors", *words).code == 0


def test_safetensors_with_a_repeated_name_is_refused(tmp_path: Path) -> None:
    entry = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    path = safetensors_file(tmp_path / "a.safetensors", f"{{{entry},{entry}}}", bytes(4))
    with pytest.raises(DataError, match="has 'w' twice"):
        load_checkpoint(path)


BAD_HEADERS = {
    "not json": "{nope",
    "nested": '{"a":' * 20_000,
    "beyond the file": '{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
    "unknown type": '{"w":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_safetensors_with_a_bad_header_is_refused(tmp_path: Path, kind: str) -> None:
    path = safetensors_file(tmp_path / "a.safetensors", BAD_HEADERS[kind], bytes(4))
    with pytest.raises(DataError, match="safetensors file is truncated or damaged"):
        load_checkpoint(path)


NOT_STATES = {
    "got list": [torch.ones(2)], "got Tensor": torch.ones(2),
    "no state dict found: the file holds 'epoch', 'optimizer'": {"epoch": 3, "optimizer": {"lr": 0.1}},
    "'epoch' is int": {"w": torch.ones(2), "epoch": 3}, "got the key '3'": {3: torch.ones(2)}, "holds no tensors": {},
    "sparse": {"w": torch.ones(2).to_sparse()},
}  # fmt: skip


@pytest.mark.parametrize("message", NOT_STATES)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_checkpoint(save(tmp_path / "a.pt", NOT_STATES[message]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    # Files of torch 2.15 and newer name a function that would have to be called.
    refusals = r"'w' is a sparse, nested, quantized or meta tensor, expected a dense one|_rebuild_nested_tensor"
    with pytest.raises((DataError, Untrusted), match=refusals):
        load_checkpoint(save(tmp_path / "a.pt", {"w": nested}))


def test_weights_that_are_not_finite_are_counted_and_named(tmp_path: Path) -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    with pytest.raises(DataError, match="'b' has 2 NaN or infinite values, and 1 other"):
        load_checkpoint(save(tmp_path / "a.pt", {"a": torch.ones(2), "b": bad, "c": bad[1:2]}))


def test_names_are_escaped_and_cut_before_they_are_printed(tmp_path: Path) -> None:
    name = "\x1b[31mred\n" + "x" * 10_000
    with pytest.raises(DataError, match="not finite") as caught:
        load_checkpoint(save(tmp_path / "a.pt", {name: torch.tensor([float("nan")])}))
    assert "\x1b" not in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_odd_paths_are_read_and_quoted(tmp_path: Path) -> None:
    path = save(tmp_path / "a b'\"ü\n.pt", STATE)
    assert load_checkpoint(path).state.keys() == STATE.keys()
    assert load_checkpoint(str(path)).path == path


def test_the_fixture_checkpoint_loads() -> None:
    checkpoint = load_checkpoint(fixture_path("lenet5-fmnist.pt"))
    assert checkpoint.state["ll.weight"].shape == (10, 84)


def test_an_unknown_fixture_is_a_missing_input() -> None:
    with pytest.raises(MissingInput, match="lacks the fixture 'none'"):
        fixture_path("none")


def test_a_symlink_is_followed_to_its_checkpoint(tmp_path: Path) -> None:
    target = save(tmp_path / "target.pt", STATE)
    (tmp_path / "link.pt").symlink_to(target)
    checkpoint = load_checkpoint(tmp_path / "link.pt")
    assert (checkpoint.size, checkpoint.path.name) == (target.stat().st_size, "link.pt")
