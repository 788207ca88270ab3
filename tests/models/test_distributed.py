"""Checkpoints that a cluster wrote, through convert: FSDP's and DeepSpeed's; and that nothing in them runs."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shlex
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from problems.command_line import Cli
from torch import Tensor, nn

from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.models.checkpoints import convert_checkpoint, load_checkpoint

NETWORK = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
STATE = NETWORK.state_dict()
pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore"),
]  # torch's own, of its storage classes and of its pickles


def same(found: dict[str, Tensor], expected: dict[str, Tensor] = STATE) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save_distributed(folder: Path, saved: dict[str, Any]) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(saved, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("above", [(), ("model",), ("app", "model"), ("state_dict",)])
def test_a_distributed_checkpoint_gives_its_weights_and_no_optimizer(tmp_path: Path, above: tuple[str, ...]) -> None:
    saved: dict[str, Any] = STATE
    for key in reversed(above):
        saved = {key: saved, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}
    folder = save_distributed(tmp_path / "step", saved)
    assert same(convert_checkpoint(folder, trust_pickle=False))


def test_convert_writes_one_file_of_a_distributed_checkpoint(cli: Cli, tmp_path: Path) -> None:
    folder = save_distributed(tmp_path / "step", {"model": {f"module.{name}": STATE[name] for name in STATE}})
    assert cli("convert", folder, tmp_path / "net.safetensors").code == 0
    assert same(load_checkpoint(tmp_path / "net.safetensors").state)


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("trust", [False, True])
def test_metadata_that_would_run_code_are_refused(tmp_path: Path, trust: bool) -> None:
    folder = save_distributed(tmp_path / "step", STATE)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(Untrusted, match=r"'posix.mkdir', which is not needed to describe tensors; nothing was run"):
        convert_checkpoint(folder, trust_pickle=trust)
    assert not (tmp_path / "ran").exists()


def test_a_part_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = save_distributed(tmp_path / "step", {"w": torch.zeros(1)})
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (tmp_path / "evil").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    next(folder.glob("*.distcp")).write_bytes((tmp_path / "evil").read_bytes())
    with pytest.raises(Untrusted, match=r"posix\.mkdir"):
        convert_checkpoint(folder, trust_pickle=False)
    assert not (tmp_path / "ran").exists()


def change(folder: Path, how: str) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first = next(iter(metadata.storage_data))
    if how == "lost":
        del metadata.storage_data[first]
    elif how == "outside":
        metadata.storage_data[first].relative_path = "../x.distcp"
    elif how == "huge":
        metadata.state_dict_metadata[first.fqn].size = torch.Size([1 << 40])
    elif how == "packed":
        metadata.storage_data[first].transform_descriptors = ["zstd"]
    elif how == "short":
        metadata.storage_data[first].length = 1 << 40
    (folder / ".metadata").write_bytes(pickle.dumps(metadata) if how != "cut" else pickle.dumps(metadata)[:100])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lost", "is missing parts of '0.weight'"), ("outside", "outside the folder"), ("huge", "the tensors claim"),
        ("packed", "unsupported transforms: 'zstd'"), ("short", "truncated"), ("cut", "is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_distributed_checkpoint_is_refused(tmp_path: Path, how: str, message: str) -> None:
    folder = save_distributed(tmp_path / "step", STATE)
    change(folder, how)
    with pytest.raises(DataError, match=message):
        convert_checkpoint(folder, trust_pickle=False)


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    folder = save_distributed(tmp_path / "step", {"w": torch.arange(6.0)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    ((index, place),) = metadata.storage_data.items()
    another = dataclasses.replace(index, offset=torch.Size([3]))
    metadata.storage_data = {index: place, another: place}  # as many numbers as are claimed
    metadata.state_dict_metadata["w"].size = torch.Size([12])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match="overlapping parts of 'w'"):
        convert_checkpoint(folder, trust_pickle=False)


def flip_a_weight(path: Path, number: float) -> None:
    """Change one bit of a number that the file holds."""
    content, raw = bytearray(path.read_bytes()), torch.tensor(number).numpy().tobytes()
    content[content.index(raw)] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_told(tmp_path: Path, scaler: Any) -> None:
    folder = save_distributed(tmp_path / "step", STATE)
    number = float(STATE["0.weight"][1, 1])
    flip_a_weight(next(folder.glob("*.distcp")), number)
    with pytest.raises(DataError, match="is damaged: checksum mismatch"):
        convert_checkpoint(folder, trust_pickle=False)
    saved = save_deepspeed(tmp_path / "run", scaler, 2, 1)
    flip_a_weight(next(saved.glob("*/*optim_states.pt")), number)
    with pytest.raises(DataError, match="is damaged: checksum mismatch"):
        convert_checkpoint(saved, trust_pickle=False)


def _train(rank: int, folder: str) -> None:
    """One of two processes that train a sharded network."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    if rank == 0:
        torch.save(network.state_dict(), f"{folder}/whole.pt")
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
    network(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    model, optim = get_state_dict(network, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/step")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_what_fsdp_saves_from_two_processes_is_put_together(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train, (str(tmp_path),), nprocs=2)
    assert len(list((tmp_path / "step").glob("*.distcp"))) == 2
    found = convert_checkpoint(tmp_path / "step", trust_pickle=False)
    assert same(found, torch.load(tmp_path / "whole.pt"))


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object of a class of DeepSpeed's, as its optimizers' files hold one; gone once they are written."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    found = type("LossScaler", (), {"__module__": name})
    for end in (index for index, char in enumerate(f"{name}.") if char == "."):
        monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    sys.modules[name].LossScaler = found  # type: ignore[attr-defined]
    return found()


def flat(tensors: list[Tensor], multiple: int) -> Tensor:
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    return torch.cat([joined, torch.zeros(-len(joined) % multiple)])


def save_deepspeed(folder: Path, scaler: Any, stage: int, ranks: int) -> Path:
    """As DeepSpeed lays it out: one group of parameters, float16 in the network's file, float32 in the optimizers'."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    parameters = dict(NETWORK.named_parameters())
    shapes = OrderedDict((name, tensor.shape) for name, tensor in parameters.items())
    buffers = [name for name, _ in NETWORK.named_buffers()]
    module = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in STATE.items()}
    if stage == 3:
        module = {name: tensor if name in buffers else torch.empty(0) for name, tensor in module.items()}
    saved = {"module": module, "buffer_names": buffers, "param_shapes": [shapes], "ds_config": {}, "shared_params": {}}
    for rank in range(ranks):
        if stage < 3:
            part = flat(list(parameters.values()), 2 * ranks).chunk(ranks)[rank].detach().clone()
            held: dict[str, Any] = {"single_partition_of_fp32_groups": [part]}
        else:
            pieces = [flat([tensor], ranks).chunk(ranks)[rank].detach().clone() for tensor in parameters.values()]
            held = {"fp32_flat_groups": [torch.cat(pieces)]}
        held |= {"zero_stage": stage, "partition_count": [ranks] if stage < 3 else ranks, "loss_scaler": scaler}
        torch.save({"optimizer_state_dict": held}, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(saved, step / f"{prefix}mp_rank_00_model_states.pt")
    del sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler
    return folder


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 3), (3, 2), (3, 3)])
def test_deepspeed_gives_the_weights_in_float32(tmp_path: Path, scaler: Any, stage: int, ranks: int) -> None:
    folder = save_deepspeed(tmp_path / "run", scaler, stage, ranks)
    said: list[str] = []
    found = convert_checkpoint(folder, trust_pickle=False, say=said.append)
    assert said == [f"float32 weights from {ranks} ranks"]
    assert all(torch.equal(found[name], tensor) for name, tensor in NETWORK.named_parameters())
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in NETWORK.named_buffers())
    assert same(convert_checkpoint(folder / "global_step7", trust_pickle=False), found)


@pytest.mark.parametrize("is_split", [False, True])
def test_parameters_that_deepspeed_did_not_train_are_as_they_were(tmp_path: Path, scaler: Any, is_split: bool) -> None:
    folder, frozen = save_deepspeed(tmp_path / "run", scaler, 2, 1), torch.randn(3, 2)
    (path,) = folder.glob("*/*model_states.pt")
    saved = torch.load(path, weights_only=False)
    kept = frozen.flatten()[: 3 if is_split else 6]
    torch.save(saved | {"frozen_param_fragments": {"base": kept}, "frozen_param_shapes": {"base": frozen.shape}}, path)
    if is_split:
        with pytest.raises(DataError, match="frozen parameters are split across ranks: 'base'"):
            convert_checkpoint(folder, trust_pickle=False, say=print)
    else:
        assert torch.equal(convert_checkpoint(folder, trust_pickle=False, say=print)["base"], frozen)


def test_deepspeed_without_its_optimizers_gives_what_ran(tmp_path: Path, scaler: Any) -> None:
    folder = save_deepspeed(tmp_path / "run", scaler, 2, 2)
    for file in folder.glob("*/*optim_states.pt"):
        file.unlink()
    said: list[str] = []
    found = convert_checkpoint(folder, trust_pickle=False, say=said.append)
    assert torch.equal(found["0.weight"], STATE["0.weight"].half())
    assert "float32 copies are missing" in said[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_is_missing_is_told(tmp_path: Path, scaler: Any, stage: int) -> None:
    folder = save_deepspeed(tmp_path / "run", scaler, stage, 3)
    next(folder.glob("*/*rank_1_*optim_states.pt")).unlink()
    with pytest.raises(MissingInput, match="optimizer files from 2 ranks, expected 3"):
        convert_checkpoint(folder, trust_pickle=False)


def test_deepspeed_files_that_name_other_code_are_refused(tmp_path: Path, scaler: Any) -> None:
    folder = save_deepspeed(tmp_path / "run", scaler, 2, 1)
    torch.save({"module": STATE, "x": Evil(tmp_path / "ran")}, folder / "global_step7/mp_rank_00_model_states.pt")
    with pytest.raises(Untrusted, match=r"posix\.mkdir"):
        convert_checkpoint(folder, trust_pickle=False)
    assert not (tmp_path / "ran").exists()


def test_a_deepspeed_checkpoint_given_as_it_is_names_the_command(cli: Cli, tmp_path: Path, scaler: Any) -> None:
    folder = save_deepspeed(tmp_path / "run", scaler, 2, 1)
    error = cli("extract-features", folder, "--model", "mlp", "--data", "a=npz:a.npz", "--json").json["error"]
    assert "is a DeepSpeed checkpoint (2 files)" in error["message"]
    words = shlex.split(error["hint"].removeprefix("merge it into one file:"))
    assert cli(*words[1:]).code == 0
    assert torch.equal(load_checkpoint(words[-1]).state["0.weight"], STATE["0.weight"])
