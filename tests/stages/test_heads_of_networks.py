"""extract-features and the opened run on networks whose head is not a linear layer at the end, and the options that choose one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header

NETWORK = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.body, self.head, self.other = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1), nn.Linear(4, 2)
        self.norm, self.returned = nn.BatchNorm1d(3), returned

    def forward(self, x):
        maps = self.body(x).relu()
        logits = self.norm(self.head(maps).mean((2, 3)))
        if self.returned == "log-probabilities":
            return logits.log_softmax(1)
        if self.returned == "two":
            return {"main": logits, "other": self.other(maps.mean((2, 3)))}
        return logits.relu()

def make(returned: str):
    return Network(returned)
"""


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Images (40, 1, 5, 5) beside net.py, its checkpoint, and splits of them; the test works there."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    space: dict[str, object] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    network = space["make"](returned="two")  # type: ignore[operator]
    network.norm.running_var.fill_(2.0)
    torch.save(network.state_dict(), "ckpt.pt")
    inputs = np.random.default_rng(0).normal(size=(40, 1, 5, 5)).astype(np.float32)
    np.savez("train.npz", x=inputs, y=np.arange(40) % 2)
    return inputs


def extraction(returned: str, *more: str) -> list[str]:
    model = ["--model", "net.py:make", "--model-arg", f"returned={returned}"]
    return ["extract-features", "ckpt.pt", *model, "--data", "train=npz:train.npz", *more]


def test_what_was_undone_is_said_and_recorded_and_the_opened_run_does_it_again(cli: Cli, images: np.ndarray) -> None:
    done = cli(*extraction("log-probabilities"))
    assert done.code == 0
    assert "head: the network returns log-probabilities (a log-softmax)" in done.stderr
    path = Path("ckpt.pt.bnn/features/train.h5")
    header = read_header(path)
    assert (header.meta["layer"], len(header.meta["head_notes"])) == ("head", 3)
    assert "up to date" in cli(*extraction("log-probabilities")).stderr
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images[7:9]), read_features(path).features[7:9])


def test_an_output_is_chosen_by_name_and_splits_share_it(cli: Cli, images: np.ndarray) -> None:
    error = cli(*extraction("two"), "--json").json["error"]
    assert (error["code"], error["hint"]) == ("not_the_head", "choose one with --last-layer NAME")
    assert cli(*extraction("two", "--output", "other")).code == 0
    path = Path("ckpt.pt.bnn/features/train.h5")
    assert read_header(path).provenance["params"]["output"] == "other"
    assert "head_notes" not in read_header(path).meta
    refused = cli(*extraction("two", "--output", "main"))
    assert (refused.code, "output: existing='other', requested='main'" in refused.stderr) == (73, True)
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images[7:9]), read_features(path).features[7:9])


def test_an_output_that_is_not_linear_is_refused_with_what_stands_before_it(cli: Cli, images: np.ndarray) -> None:
    done = cli(*extraction("relu"), "--json")
    assert done.code == 65
    assert "computed from 'head' by mean, batch_norm, relu" in done.json["error"]["message"]
    assert "--last-layer identity puts" in done.json["error"]["hint"]


def test_an_identity_layer_on_such_an_output_is_a_head_like_any_other(cli: Cli, images: np.ndarray) -> None:
    done = cli(*extraction("relu", "--last-layer", "identity"))
    assert (done.code, "identity: the head is an identity layer on the network's logits" in done.stderr) == (
        0,
        True,
    )
    path = Path("ckpt.pt.bnn/features/train.h5")
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images), read_features(path).features)
    assert read_features(path).head_notes == tuple(read_header(path).meta["head_notes"])
    assert cli("fit-laplace", "ckpt.pt", "--prior-precision", "1").code == 0
    answer = run.predict(images[:2], posterior="laplace", integrator="plug-in", allow_stale=True)
    assert answer.probs.shape == (2, 3)


def test_the_opened_run_takes_the_same_state_and_the_same_output(cli: Cli, images: np.ndarray) -> None:
    state = torch.load("ckpt.pt")
    averaged = {name: tensor / 2 for name, tensor in state.items()}
    torch.save({"state_dict": state, "ema": averaged}, "ckpt.pt")
    words = ("--last-layer", "identity", "--output", "other", "--state", "ema")
    assert cli(*extraction("two", *words)).code == 0
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images), read_features(Path("ckpt.pt.bnn/features/train.h5")).features)


@pytest.mark.parametrize("option", ["--last-layer", "--output"])
def test_inputs_that_are_the_features_have_no_head_to_choose(cli: Cli, images: np.ndarray, option: str) -> None:
    done = cli("extract-features", "run", "--model", "flatten", "--data", "train=npz:train.npz", option, "identity")
    assert (done.code, f"{option} needs a network" in done.stderr) == (2, True)


def test_ready_features_have_no_output_to_choose(cli: Cli, images: np.ndarray) -> None:
    done = cli("extract-features", "run", "--from-npz", "train.npz", "--output", "main")
    assert (done.code, "--output needs a network" in done.stderr) == (2, True)
