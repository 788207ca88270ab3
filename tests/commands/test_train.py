"""train: what it writes, what later commands make of it, and how it goes on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from safetensors.torch import load_file

from bnncli.artifacts.posteriors import gradient_passes
from bnncli.errors import Interrupted
from bnncli.models.build import load_network
from bnncli.session import produce

NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
"""
MLP = ("--model", "mlp", "--model-arg", "inputs=6", "--model-arg", "hidden=5", "--model-arg", "classes=3")
DATA = ("--data", "train=npz:train.npz", "--data", "test=npz:test.npz")
SHORT = (*DATA, "--epochs", 3, "--batch-size", 16, "--learning-rate", 0.01)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two splits of three classes that a line tells apart, and a network of one's own."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 30)):
        x = rng.normal(size=(count, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=x[:, :3].argmax(1))
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_carries_what_later_commands_need(cli: Cli) -> None:
    done = cli("train", "a.safetensors", *MLP, *SHORT, "--mean", 0.1, "--std", 2, "--hold-out", "val=train:10")
    assert (done.code, done.stdout) == (0, "a.safetensors\n")
    assert "next: bnncli extract-features a.safetensors --data train=npz:train.npz" in done.stderr
    assert gradient_passes(Path("a.safetensors")) == 3
    cli("train", "a.safetensors", *MLP, *SHORT, "--mean", 0.1, "--std", 2, "--hold-out", "val=train:10").expect(
        0, "up to date"
    )
    cli("train", "a.safetensors", *MLP, *SHORT).expect(73, "mean: existing='0.1', requested=none")
    cli("extract-features", "a.safetensors", *DATA, "--hold-out", "val=train:10", "--json").expect(
        0, "trained with mlp, classes=3, hidden=5, inputs=6, mean 0.1, std 2"
    )
    again = cli("train", "a.safetensors", *MLP, *SHORT, "--mean", 0.1, "--std", 2, "--hold-out", "val=train:10")
    assert "next:" not in again.stderr  # its features are there
    made = cli("inspect", "a.safetensors.bnn/posteriors/map.safetensors", "--json")
    assert made.json["meta"]["gradient_passes"] == 3
    with np.load("test.npz") as arrays:
        inputs = torch.from_numpy((arrays["x"] - np.float32(0.1)) / np.float32(2))
    network = load_network("mlp", {"inputs": "6", "hidden": "5", "classes": "3"}, load_file("a.safetensors"))
    scores = cli(
        "train", "a.safetensors", *MLP, *SHORT, "--mean", 0.1, "--std", 2, "--hold-out", "val=train:10", "--json"
    )
    is_right = network(inputs).argmax(1).numpy() == np.load("test.npz")["y"]
    assert scores.json["metrics"]["splits"]["test"]["accuracy"] == pytest.approx(is_right.mean())


def test_preprocessing_that_differs_is_warned_of(cli: Cli) -> None:
    cli("train", "a.safetensors", *MLP, *SHORT, "--std", 2).expect(0)
    cli("extract-features", "a.safetensors", "--model", "mlp", *DATA, "--std", 3).expect(
        0, "was trained with --std 2; you asked for 3"
    )


def test_code_that_a_checkpoint_names_is_not_run_unasked(cli: Cli) -> None:
    cli("train", "a.safetensors", "--model", "net.py:make", *SHORT).expect(
        0, "next: bnncli extract-features a.safetensors --model net.py:make"
    )
    Path("net.py").write_text("open('ran', 'w').close()" + NETWORK)
    cli("extract-features", "a.safetensors", *DATA).expect(
        2, "was trained with a network from your own code; to run it, name the network with --model"
    )
    assert not Path("ran").exists()


def test_a_network_in_code_is_named_with_all_that_it_was_trained_with(cli: Cli) -> None:
    Path("net.py").write_text(
        NETWORK.replace("make()", "make(width=4)").replace("4", "int(width)").replace("=int(width)", "=4")
    )
    words = ("--model", "net.py:make", "--model-arg", "width=5", "--mean", 0.1, "--std", 2)
    done = cli("train", "a.safetensors", *words, *SHORT)
    said = "--model net.py:make --model-arg width=5 --mean 0.1 --std 2"
    assert f"next: bnncli extract-features a.safetensors {said} --data train=npz:train.npz" in done.stderr
    asked = cli("extract-features", "a.safetensors", *DATA, "--std", 3)
    [hint] = [line for line in asked.stderr.splitlines() if line.startswith("hint: ")]
    assert hint.endswith("--std 3 --model net.py:make --model-arg width=5 --mean 0.1")
    cli(*shlex.split(hint.removeprefix("hint: bnncli ").replace("--std 3", "--std 2"))).expect(0)
    assert cli("extract-features", "a.safetensors").stderr.endswith(f"{said} --data SPLIT=SPEC\n")


def test_averaged_weights_are_found_by_state_ema(cli: Cli) -> None:
    cli("train", "a.safetensors", *MLP, *SHORT, "--ema", 0.9).expect(0)
    tensors = load_file("a.safetensors")
    for name, prefix in (("raw", "model."), ("ema", "model_ema.")):
        more = ("--state", "ema") if name == "ema" else ()
        cli("extract-features", "a.safetensors", *DATA, *more, "--run-dir", name).expect(0)
        head = load_file(f"{name}/posteriors/map.safetensors")
        assert torch.equal(head["mean"][:15], tensors[f"{prefix}ll.weight"].flatten().to(head["mean"]))
    assert not torch.equal(tensors["model.ll.weight"], tensors["model_ema.ll.weight"])


def test_seeds_start_from_weights_of_their_own(cli: Cli) -> None:
    words = ("m.safetensors", *MLP, *DATA, "--epochs", 1, "--learning-rate", 1e-12, "--seeds", 2)
    cli("train", *words).expect(0)
    first, second = load_file("m-0.safetensors"), load_file("m-1.safetensors")
    assert not any(torch.allclose(value, second[name], atol=1e-3) for name, value in first.items())


def test_seeds_write_a_checkpoint_each_near_that_of_one_alone(cli: Cli) -> None:
    done = cli("train", "m.safetensors", *MLP, *SHORT, "--seeds", 2, "--seed", 3)
    assert (done.code, done.stdout) == (0, "m-3.safetensors\nm-4.safetensors\n")
    cli("train", "alone.safetensors", *MLP, *SHORT, "--seed", 4).expect(0)
    together, alone = load_file("m-4.safetensors"), load_file("alone.safetensors")
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
    cli("train", "own.safetensors", "--model", "net.py:make", *SHORT, "--seeds", 2).expect(
        2, "--seeds: cannot train several copies of this network at once"
    )


@pytest.mark.parametrize("model", [MLP, ("--model", "net.py:make")])
def test_interrupted_training_goes_on(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...]) -> None:
    words = (*model, *SHORT, "--ema", 0.9, "--save-every", 1000)
    cli("train", "whole.safetensors", *words).expect(0)
    plain, calls = produce.Resumable.save, []

    def stopping(self: Any, state: Any, is_last: bool) -> None:
        calls.append(is_last)
        if len(calls) == 2:
            raise Interrupted(15, "interrupted")
        plain(self, state, is_last)

    with monkeypatch.context() as patch:
        patch.setattr(produce.Resumable, "save", stopping)
        done = cli("train", "a.safetensors", *words)
    assert done.code == 143
    assert "--resume" in done.stderr
    assert not Path("a.safetensors").exists()
    assert Path(".a.resume.safetensors").exists()
    cli("train", "a.safetensors", *words, "--resume").expect(0)
    whole, resumed = load_file("whole.safetensors"), load_file("a.safetensors")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert not Path(".a.resume.safetensors").exists()


def test_seeds_that_workers_share_out_are_those_of_each_alone_to_the_bits(cli: Cli) -> None:
    words = ("--model", "net.py:make", *SHORT, "--ema", 0.9)  # with a dropout of its own: it has no copies in one batch
    done = cli("train", "m.safetensors", *words, "--seeds", 3, "--seed", 3, "--shards", 64, "--json").expect(0)
    for place, seed in enumerate((3, 4, 5)):
        alone = cli("train", f"alone-{seed}.safetensors", *words, "--seed", seed, "--json")
        one, other = load_file(f"m-{seed}.safetensors"), load_file(f"alone-{seed}.safetensors")
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
        paths = {"path": ""}
        assert done.json["networks"][place] | paths == alone.json["networks"][0] | paths


def test_seeds_that_workers_share_out_go_on_where_all_of_them_were(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*MLP, *SHORT, "--seeds", 2, "--shards", 64)
    cli("train", "whole.safetensors", *words).expect(0)
    calls: list[int] = []

    def stopping(self: Any) -> bool:
        calls.append(len(calls))
        if len(calls) == 5:
            raise Interrupted(15, "interrupted")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(produce.Resumable, "is_due", stopping)
        done = cli("train", "a.safetensors", *words)
    assert done.code == 143
    kept = load_file(".a-0.resume.safetensors")
    assert [len(kept[f"{seed}/history.loss"]) for seed in (0, 1)] == [
        3,
        2,
    ]  # three epochs of the first, two of the other
    cli("train", "a.safetensors", *MLP, *SHORT, "--seeds", 2, "--resume").expect(
        65, "saved with networks grouped into different batches"
    )
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(produce.Resumable, "is_due", lambda self: calls.append(0) or False)
        cli("train", "a.safetensors", *words, "--resume").expect(0)
    assert len(calls) == 2  # one epoch is left, and the meeting where all are done
    for seed in (0, 1):
        whole, resumed = load_file(f"whole-{seed}.safetensors"), load_file(f"a-{seed}.safetensors")
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert not Path(".a-0.resume.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("a.pt", *MLP, *DATA), 2, "CKPT: expected a name that ends in .safetensors; got 'a.pt'"),
        (("a.safetensors", *DATA), 2, "--model: name a network, or a --recipe that has one"),
        (("a.safetensors", *MLP), 2, "--data: give the training split, such as --data train=npz:train.npz"),
        (("a.safetensors", *MLP, *DATA, "--optimizer", "sgd"), 2, "--optimizer sgd needs --learning-rate"),
        (("a.safetensors", *MLP, *DATA, "--momentum", 0.5), 2, "--momentum is for --optimizer sgd and nesterov"),
        (("a.safetensors", *MLP, *DATA, "--augment", "flip"), 2, "--augment needs images"),
        (("a.safetensors", "--model", "flatten", *DATA), 2, "flatten has nothing to train"),
        (("a.safetensors", "--model", "hf:x", *DATA), 2, "expected a built-in network"),
        (("a.safetensors", *MLP, "--model-arg", "classes=2", *DATA), 65, "a label is 2, but the network has classes 0 to 1"),
        (("a.safetensors", *MLP, "--model-arg", "inputs=7", *DATA), 65, "the network failed on inputs of shape (2, 6)"),
        (("a.safetensors", "--model", "mlp", *DATA), 65, "hint: set the number of inputs: --model-arg inputs=6"),
        (("a.safetensors", "--model", "lenet5", *DATA), 65, "--resize and --crop change image sizes"),
        (("a.safetensors", *MLP, *SHORT, "--learning-rate", 1e6, "--optimizer", "sgd"), 70, "use a --learning-rate below 1e+06"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_a_line(cli: Cli, words: tuple[object, ...], code: int, said: str) -> None:
    cli("train", *words).expect(code, said)
    assert not Path("a.safetensors").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_that_is_not_finite_is_named_before_any_training(cli: Cli, value: float) -> None:
    with np.load("test.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    x[11, 2] = value
    np.savez("test.npz", x=x, y=y)
    cli("train", "a.safetensors", *MLP, *SHORT, "--hold-out", "val=test:25").expect(
        65, "expected finite inputs; row 11 of npz:test.npz has NaN or infinite values"
    )
    assert not Path("a.safetensors").exists()


def test_a_dry_run_writes_nothing(cli: Cli, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert "compute: a.safetensors" in cli("train", "a.safetensors", *MLP, *SHORT, "--dry-run").expect(0).stdout
    assert sorted(folder.rglob("*")) == before


def test_clean_removes_what_an_interrupted_training_left(cli: Cli) -> None:
    cli("train", "a.safetensors", *MLP, *SHORT).expect(0)
    cli("extract-features", "a.safetensors", *DATA).expect(0)
    Path(".a.resume.safetensors").write_bytes(b"half")
    assert cli("clean", "a.safetensors").stdout == ".a.resume.safetensors\n"
    assert not Path(".a.resume.safetensors").exists()
