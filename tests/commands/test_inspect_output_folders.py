"""inspect and extract-features on output folders of the Trainer and of Lightning."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from safetensors.torch import save_file

from bnncli.models.build import load_network

CONFIG = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_model(path: str, value: float | None = None, **state: Any) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    Path(path, "config.json").write_text(json.dumps(CONFIG))
    if value is not None:
        save_file({"w": torch.full((2,), value)}, f"{path}/model.safetensors")
    if state:
        Path(path, "trainer_state.json").write_text(json.dumps(state))


BEST = {"best_model_checkpoint": "/home/me/out/checkpoint-500", "best_metric": 0.25}
# Weights at the top, best checkpoint, then what is suggested and why.
TRAINERS: dict[str, tuple[float | None, dict[str, Any], str, str]] = {
    "best": (None, BEST, "out/checkpoint-500", "the best according to trainer_state.json (best_metric 0.25)"),
    "last": (None, {"epoch": 1}, "out/checkpoint-1000", "the last; no best one is recorded"),
    "best is gone": (None, {"best_model_checkpoint": "c:\\x\\checkpoint-9"}, "out/checkpoint-1000", "'checkpoint-9', is not there"),
    "top": (3.0, {"epoch": 1}, "out", "the folder's own weights; the best checkpoint is not recorded"),
    "top is best": (1.0, BEST, "out", "own weights, which are those of checkpoint-500, the best"),
    "top is not best": (2.0, BEST, "out/checkpoint-500", "the folder's own weights are different"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINERS)
def test_the_best_checkpoint_of_a_trainer_folder_is_suggested(cli: Cli, case: str) -> None:
    top, state, chosen, reason = TRAINERS[case]
    save_model("out/checkpoint-500", 1.0, epoch=0)
    save_model("out/checkpoint-1000", 2.0, **state)
    save_model("out/checkpoint-2000", None, epoch=2)  # interrupted before its weights were written
    if top is not None:
        save_model("out", top)
    document = cli("inspect", "out", "--json").json
    assert (document["checkpoint"], reason in document["reason"]) == (chosen, True)
    assert len(document["others"]) == (2 if chosen == "out" else 1)
    line = f"bnncli extract-features {chosen} --model hf:{chosen} --data train=images:TRAIN"
    assert document["suggested"] == cli("inspect", "out").stdout.splitlines()[-1] == line
    if chosen != "out":
        error = cli("extract-features", "out", "--model", "lenet5", "--data", "a=npz:x.npz", "--json").json["error"]
        assert f"hf:{chosen}" in error["hint"]
    if top is None:
        error = cli("extract-features", "out", "--model", "hf:out", "--data", "a=images:x", "--json").json["error"]
        assert f"use --model hf:{chosen} " in error["hint"]


def test_weights_of_a_network_in_code_are_given_as_a_file(cli: Cli) -> None:
    for step in (9, 10):
        save_model(f"out/checkpoint-{step}", 1.0, epoch=step)
        Path(f"out/checkpoint-{step}/config.json").rename(f"out/checkpoint-{step}/tokenizer_config.json")
    line = "bnncli extract-features out/checkpoint-10/model.safetensors --model NET.py:FACTORY --data train=SPEC"
    assert cli("inspect", "out", "--json").json["suggested"] == line
    error = cli("extract-features", "out", "--data", "a=npz:x.npz", "--json").json["error"]
    assert (
        error["hint"]
        == "bnncli extract-features out/checkpoint-10/model.safetensors --data a=npz:x.npz --json --model NET.py:FACTORY"
    )


def save_lightning(path: str, best: str | None = None) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    callback = {"best_model_path": best or path, "best_model_score": best and torch.tensor(0.5)}
    state = {f"net.{name}": value for name, value in load_network("lenet5", {}, None).state_dict().items()}
    content = {"state_dict": state, "pytorch-lightning_version": "2.4.0", "callbacks": {"ModelCheckpoint{}": callback}}
    torch.save(content, path)


@pytest.mark.parametrize("given", ["", "lightning_logs", "lightning_logs/version_10/checkpoints"])
@pytest.mark.parametrize("best", [None, "/far/away/epoch=9-step=90.ckpt"])
def test_the_best_checkpoint_of_lightning_logs_is_suggested(cli: Cli, given: str, best: str | None) -> None:
    place = "runs/lightning_logs/version_10/checkpoints"
    save_lightning("runs/lightning_logs/version_9/checkpoints/epoch=99-step=990.ckpt")
    Path("runs/lightning_logs/version_11").mkdir()  # stopped before its first checkpoint
    save_lightning(f"{place}/epoch=9-step=90.ckpt")
    save_lightning(f"{place}/epoch=10-step=100.ckpt", best)
    name = "epoch=10-step=100.ckpt" if best is None else "epoch=9-step=90.ckpt"
    document = cli("inspect", f"runs/{given}", "--json").json
    assert document["checkpoint"] == f"{place}/{name}"
    assert document["reason"].startswith("the last" if best is None else "the best")
    assert len(document["others"]) == (1 if "version" in given else 2)
    np.savez("TRAIN.npz", x=np.zeros((9, 1, 28, 28), np.float32), y=np.arange(9))
    hint = cli("extract-features", f"runs/{given}", "--model", "lenet5", "--data", "a=npz:x", "--json").json["error"][
        "hint"
    ]
    assert hint == f"give the checkpoint inside it: {place}/{name}"
    done = cli("extract-features", f"runs/{given}", "--data", "train=npz:TRAIN.npz")
    hint = done.stderr.splitlines()[-1].removeprefix("hint: ")
    assert hint == f"bnncli extract-features {place}/{name} --data train=npz:TRAIN.npz --model lenet5"
    cli(*shlex.split(hint)[1:], "--dry-run").expect(0)
    done = cli("extract-features", f"runs/{given}")
    assert f"hint: bnncli extract-features {place}/{name} --model lenet5 --data train=SPEC\n" in done.stderr
    cli(*shlex.split(document["suggested"])[1:]).expect(0)


def save_deepspeed(folder: Path) -> None:
    (folder / "global_step7").mkdir()
    (folder / "latest").write_text("global_step7")
    torch.save({"module": {"w": torch.ones(2)}, "param_shapes": []}, folder / "global_step7/mp_rank_00_model_states.pt")


def save_fsdp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": {"w": torch.ones(2)}}, checkpoint_id=folder / "optimizer_0", no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["out", "out/checkpoint-7"])
@pytest.mark.parametrize("config", ["out/checkpoint-7", "out", None])
def test_shards_in_a_trainer_folder_are_merged_first(cli: Cli, place: str, config: str | None) -> None:
    Path("out/checkpoint-7").mkdir(parents=True)
    save = save_fsdp if config is None or config == "out" else save_deepspeed
    save(Path("out/checkpoint-7"))
    if config is not None:
        save_model(config)
    document = cli("inspect", place, "--json").json
    command, then = shlex.split(document["suggested"]), shlex.split(document["then"])
    assert command[:3] == ["bnncli", "convert", "out/checkpoint-7"]
    assert then[2:5] == [command[3], "--model", "NET.py:FACTORY" if config is None else f"hf:{config}"]
    assert document["then"] in cli("inspect", place).stderr
    for words in ["", "--model lenet5", "--model hf:out/checkpoint-7"]:
        if not (config == "out/checkpoint-7" and "hf" in words):  # says so once the network is loaded
            error = cli("extract-features", place, *words.split(), "--data", "a=npz:x.npz", "--json").json["error"]
            assert error["hint"] == f"merge it into one file: {document['suggested']}"
    cli(*command[1:]).expect(0)
