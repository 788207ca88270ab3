"""Chains over networks, and heads of networks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.own_networks import CODE, extract_own

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.evaluate import Reference
from bnncli.commands.hmc import HmcOptions, find_failure
from bnncli.session.inputs import open_samples
from bnncli.session.produce import ResumableDraws
from bnncli.system import signals

LINEAR = "nn.Linear(3, 2)"
TANH = "nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)"
HMC = ("hmc", "ckpt.pt", "--layers", "all", "--trust-code", "--chains", 4, "--warmup", 6, "--draws", 16)
Make = Callable[[str, int], None]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make_run(layers, inputs): features of a network by the user's own code; the test works beside them."""
    monkeypatch.chdir(tmp_path)

    def make(layers: str, size: int) -> None:
        rng, splits = np.random.default_rng(0), {}
        for name, count in (("train", 40), ("val", 20), ("test", 10)):
            x = rng.normal(size=(count, size)).astype(np.float32)
            splits[name] = (x, (x[:, 0] + 0.7 * rng.normal(size=count) > 0).astype(np.int64))
        extract_own(CODE.format(layers), splits, scale=0.1)

    return make


def draws_of(name: str) -> Any:
    return open_samples(Path(f"ckpt.pt.bnn/posteriors/{name}.nc"))[0].draws.double()


@pytest.mark.long
def test_chains_in_two_modes_of_the_same_network_agree_by_their_predictions(cli: Cli, make_run: Make) -> None:
    make_run(TANH, 1)
    # At weights near zero the Gaussian is the prior: chains start on both sides, and seldom change.
    words = (
        "hmc",
        "ckpt.pt",
        "--layers",
        "all",
        "--trust-code",
        "--prior-precision",
        1,
        "--chains",
        40,
        "--warmup",
        24,
    )
    done = cli(*words, "--draws", 80, "--max-rhat", 1.05, "--json").expect(0)
    assert read_header(Path("ckpt.pt.bnn/posteriors/hmc-all.nc")).meta["whitening"] == "kron"  # without a base
    metrics = done.json["metrics"]
    assert metrics["judged_by"] == "heldout"
    assert metrics["heldout_max_rhat"] < 1.05 < 1.2 < metrics["max_rhat"]
    assert "not used for the verdict" in done.stderr
    assert "do not agree" not in done.stderr
    assert Reference("hmc-all", Path("ckpt.pt.bnn/posteriors/hmc-all.nc")).doubts() == []
    failure = find_failure(metrics, HmcOptions(layers="all", max_rhat=1.0001))
    assert failure is not None
    assert f"the largest R-hat of predictions is {metrics['heldout_max_rhat']:.4f}" in failure.message
    assert find_failure(metrics, HmcOptions(layers="all", until="rhat<=1.05")) is None


def test_draws_of_a_network_are_stored_opened_and_predicted_with(cli: Cli, make_run: Make) -> None:
    make_run(f"nn.Linear(2, 3), nn.ReLU(), {LINEAR}", 2)
    cli("fit-laplace", "ckpt.pt", "--layers", "all", "--trust-code", "--prior-precision", 2).expect(0)
    cli(*HMC, "--json").expect(0)
    path = Path("ckpt.pt.bnn/posteriors/hmc-all.nc")
    header = read_header(path)
    assert (header.meta["layers"], header.meta["prior_precision"], header.meta["whitening"]) == ("all", 2.0, "full")
    assert [part["name"] for part in header.meta["param_layout"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "up to date" in cli(*(word for word in HMC if word != "--trust-code")).stderr  # which runs no code
    cli("predict", "ckpt.pt", "--posterior", "hmc-all", "--split", "test", "--trust-code").expect(0)
    stored = read_predictions(Path("ckpt.pt.bnn/predictions/hmc-all.mc/test.h5"))
    with np.load("test.npz") as arrays:
        x = arrays["x"].astype(np.float64)
    expected, mean_logits = np.zeros((10, 2)), np.zeros((10, 2))
    for draw in draws_of("hmc-all").flatten(0, 1).numpy():
        hidden = np.maximum(x @ draw[:6].reshape(3, 2).T + draw[6:9], 0)
        logits = hidden @ draw[9:15].reshape(2, 3).T + draw[15:]
        expected += np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) / 64
        mean_logits += logits / 64
    np.testing.assert_allclose(stored.probs, expected, atol=1e-5)
    np.testing.assert_allclose(stored.max_logit, mean_logits.max(axis=1), atol=1e-5)  # not those of a mean network
    np.testing.assert_allclose(stored.energy, -np.log(np.exp(mean_logits).sum(axis=1)), atol=1e-5)
    cli("predict", "ckpt.pt", "--posterior", "hmc-all", "--integrator", "plug-in", "--trust-code").expect(
        2, "several modes, and their mean is not a useful network", "integrators for a samples posterior: mc"
    )
    cli("fit-temperature", "ckpt.pt", "--base", "hmc-all", "--name", "scaled").expect(
        2, "--base: hmc-all is over --layers all, but a temperature divides"
    )
    judged = cli("diagnose", "ckpt.pt", "--layers", "all", "--draws", 16, "--trust-code", "--json").json["verdict"]
    longer = "bnncli hmc ckpt.pt --layers all --base laplace-all --trust-code --warmup 12 --draws 32 --force"
    assert judged["run"] == longer  # not the draws that are there


def test_the_distance_of_few_stored_draws_is_told_by_those_there_are(cli: Cli, make_run: Make) -> None:
    make_run(LINEAR, 3)
    layers = ("ckpt.pt", "--layers", "all", "--trust-code")
    chains = ("--chains", 2, "--warmup", 2, "--draws", 4)
    cli("hmc", *layers, *chains, "--prior-precision", 2).expect(0)
    cli("fit-laplace", *layers, "--prior-precision", 2, "--draws", 6, "--name", "drawn").expect(0)
    cli("predict", *layers, "--posterior", "drawn", "--split", "test").expect(0)
    done = cli("evaluate", "ckpt.pt", "--split", "test", "--posterior", "drawn", "--json").expect(0)
    found = {row["name"]: row for row in done.json["rows"][0]["metrics"]}["mmd2"]
    assert (found["reference"], found["n"], found["value"] is None) == ("hmc-all", [6, 8], False)


@pytest.mark.long
def test_distances_are_to_draws_over_the_same_layers(cli: Cli, make_run: Make) -> None:
    make_run(LINEAR, 3)
    short = ("hmc", "ckpt.pt", "--chains", 2, "--warmup", 2, "--draws", 4, "--prior-precision", 2)
    layers = ("--layers", "0", "--trust-code")
    for words in (short, (*short, *layers), (*short, *layers, "--name", "other", "--seed", 1)):
        cli(*words).expect(0)
    cli("predict", "ckpt.pt", "--split", "test", "--trust-code").expect(0)
    words = ("evaluate", "ckpt.pt", "--split", "test", "--assert", "mmd2<=9")
    rows = {row["posterior"]: row["metrics"] for row in cli(*words, "--json").json["rows"]}
    found = {name: next(one for one in metrics if one["name"] == "mmd2") for name, metrics in rows.items()}
    assert {name: one["reference"] for name, one in found.items()} == {
        "map": "hmc", "hmc": "hmc", "hmc-0": "hmc-0", "other": "hmc-0"
    }  # fmt: skip
    assert [name for name, one in found.items() if one["value"] is None] == ["hmc", "hmc-0"]  # none to themselves
    cli(*words, "--layers", "0").expect(0)
    named = cli("evaluate", "ckpt.pt", "--reference", "other", "--posterior", "map", "--force", "--json")
    told = {metric.get("undefined") for metric in named.json["rows"][0]["metrics"] if metric["name"] == "mmd2"}
    assert told == {"the draws of other are over other layers"}


@pytest.mark.long
def test_interrupted_network_run_continues_exactly(cli: Cli, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(TANH, 1)
    words = (*HMC, "--prior-precision", 1, "--until", "ess>=100", "--json")
    whole = cli(*words, "--name", "whole")
    assert whole.json["metrics"]["draws"] > 16
    offer, left = ResumableDraws.offer, [26]

    def stop(self: ResumableDraws, tensors: Any, *, is_last: bool = False) -> None:
        offer(self, tensors, is_last=is_last)
        left[0] -= not is_last
        if left[0] == 0 and not is_last:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ResumableDraws, "offer", stop)
    cli(*words, "--name", "cut").expect(128 + signal.SIGTERM)
    signals.forget_received()
    again = cli(*words, "--name", "cut", "--resume")
    assert "resuming after 26 transitions" in again.stderr
    digests = [done.json["outputs"][0]["content_digest"] for done in (whole, again)]
    assert digests[0] == digests[1]


def test_without_labels_to_judge_by_the_training_labels_do(cli: Cli, make_run: Make) -> None:
    make_run(TANH, 1)
    Path("ckpt.pt.bnn/features/val.h5").unlink()
    done = cli(*HMC, "--prior-precision", 1, "--json")
    assert done.json["metrics"]["judged_by"] == "train"
    assert "log probabilities of training labels (no labelled val split)" in done.stderr
    assert done.json["metrics"]["heldout_max_rhat"] is None


def test_requests_over_networks_that_cannot_be_are_told(cli: Cli, make_run: Make) -> None:
    make_run(TANH, 1)
    cli(*HMC).expect(66, "fit-laplace ckpt.pt --layers all --trust-code")
    cli("fit-laplace", "ckpt.pt", "--prior-precision", 2).expect(0)
    cli(*HMC, "--base", "laplace").expect(2, "--base laplace is over --layers last, but got --layers all")
    cli(*HMC, "--prior-precision", 1, "--gradients", "tf32").expect(2, "--gradients is for the last layer")
    cli(*HMC, "--prior-precision", 1, "--base", "laplace").expect(2, "give only one of --prior-precision and --base")


def test_chains_of_networks_are_merged_and_judged_by_predictions(cli: Cli, make_run: Make) -> None:
    make_run(LINEAR, 3)
    for seed in (1, 2):
        cli(*HMC, "--prior-precision", 2, "--seed", seed, "--name", f"hmc-{seed}").expect(0)
    words = ("merge", "ckpt.pt", "--posterior", "hmc-1", "--posterior", "hmc-2", "--trust-code")
    cli(*words[:-1]).expect(77)
    metrics = cli(*words, "--json").expect(0).json["metrics"]
    assert (metrics["chains"], metrics["judged_by"]) == (8, "heldout")
    assert torch.equal(draws_of("merged"), torch.cat([draws_of("hmc-1"), draws_of("hmc-2")]))
    cli("predict", "ckpt.pt", "--posterior", "merged", "--split", "test", "--trust-code").expect(0)
    cli("fit-laplace", "ckpt.pt", "--prior-precision", 2).expect(0)
    cli("hmc", "ckpt.pt", "--chains", 4, "--warmup", 6, "--draws", 16, "--name", "last", "--seed", 3).expect(0)
    cli("merge", "ckpt.pt", "--posterior", "hmc-1", "--posterior", "last").expect(
        65, "has layers last, but it is all in"
    )


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
    cli(*extraction("log-probabilities")).expect(0, "head: the network returns log-probabilities (a log-softmax)")
    path = Path("ckpt.pt.bnn/features/train.h5")
    header = read_header(path)
    assert (header.meta["layer"], len(header.meta["head_notes"])) == ("head", 3)
    assert "up to date" in cli(*extraction("log-probabilities")).stderr
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images[7:9]), read_features(path).features[7:9])


def test_an_output_is_chosen_by_name_and_splits_share_it(cli: Cli, images: np.ndarray) -> None:
    error = cli(*extraction("two"), "--json").json["error"]
    assert (error["code"], error["hint"]) == ("not_the_head", "choose one with --last-layer NAME")
    cli(*extraction("two", "--output", "other")).expect(0)
    path = Path("ckpt.pt.bnn/features/train.h5")
    assert read_header(path).provenance["params"]["output"] == "other"
    assert "head_notes" not in read_header(path).meta
    cli(*extraction("two", "--output", "main")).expect(73, "output: existing='other', requested='main'")
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images[7:9]), read_features(path).features[7:9])


def test_an_output_that_is_not_linear_is_refused_with_what_stands_before_it(cli: Cli, images: np.ndarray) -> None:
    done = cli(*extraction("relu"), "--json").expect(65)
    assert "computed from 'head' by mean, batch_norm, relu" in done.json["error"]["message"]
    assert "--last-layer identity puts" in done.json["error"]["hint"]


def test_an_identity_layer_on_such_an_output_is_a_head_like_any_other(cli: Cli, images: np.ndarray) -> None:
    cli(*extraction("relu", "--last-layer", "identity")).expect(
        0, "identity: the head is an identity layer on the network's logits"
    )
    path = Path("ckpt.pt.bnn/features/train.h5")
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images), read_features(path).features)
    assert read_features(path).head_notes == tuple(read_header(path).meta["head_notes"])
    cli("fit-laplace", "ckpt.pt", "--prior-precision", "1").expect(0)
    answer = run.predict(images[:2], posterior="laplace", integrator="plug-in", allow_stale=True)
    assert answer.probs.shape == (2, 3)


def test_the_opened_run_takes_the_same_state_and_the_same_output(cli: Cli, images: np.ndarray) -> None:
    state = torch.load("ckpt.pt")
    averaged = {name: tensor / 2 for name, tensor in state.items()}
    torch.save({"state_dict": state, "ema": averaged}, "ckpt.pt")
    words = ("--last-layer", "identity", "--output", "other", "--state", "ema")
    cli(*extraction("two", *words)).expect(0)
    run = bnncli.open("ckpt.pt", model="net.py:make")
    np.testing.assert_array_equal(run.features(images), read_features(Path("ckpt.pt.bnn/features/train.h5")).features)


@pytest.mark.parametrize("option", ["--last-layer", "--output"])
def test_inputs_that_are_the_features_have_no_head_to_choose(cli: Cli, images: np.ndarray, option: str) -> None:
    cli("extract-features", "run", "--model", "flatten", "--data", "train=npz:train.npz", option, "identity").expect(
        2, f"{option} needs a network"
    )
