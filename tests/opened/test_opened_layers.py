"""Posteriors over other layers, from Python: predictions for inputs and for splits, bit for bit those that predict stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

import bnncli
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import DataError, Untrusted

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""


@pytest.fixture
def images(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Bytes of a run with laplace-all and its predictions; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    space: dict[str, object] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    inputs = np.random.default_rng(0).integers(256, size=(40, 2, 2), dtype=np.uint8)
    np.savez("data.npz", x=inputs, y=np.arange(40) % 2)
    data = ("--data", "train=npz:data.npz", "--data", "test=npz:data.npz@30", "--mean", "0.4")
    assert cli("extract-features", "ckpt.pt", "--model", "net.py:make", *data).code == 0
    fit = ("fit-laplace", "ckpt.pt", "--layers", "all", "--prior-precision", 3, "--trust-code")
    assert cli(*fit).code == 0
    predict = ("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code")
    assert cli(*predict, "--integrator", "logit-mc", "--integrator", "mc", "--samples", 50).code == 0
    return inputs[:30]


@pytest.mark.parametrize("integrator", ["logit-mc", "mc"])
def test_inputs_and_split_names_predict_what_predict_stores(images: np.ndarray, integrator: str) -> None:
    stored = read_predictions(Path(f"ckpt.pt.bnn/predictions/laplace-all.{integrator}/test.h5"))
    run = bnncli.open("ckpt.pt", model="net.py:make")
    for x in (images, "test"):
        found = run.predict(x, posterior="laplace-all", integrator=integrator, samples=50)
        np.testing.assert_array_equal(found.probs, stored.probs)
        np.testing.assert_array_equal(found.interval, stored.interval)
    assert run.posterior("laplace-all").layout.num_params == 23


def test_features_in_the_place_of_inputs_are_one_clear_error(images: np.ndarray) -> None:
    run = bnncli.open("ckpt.pt", model="net.py:make")
    with pytest.raises(
        DataError, match=r"x: expected inputs of the network .* covers other layers .* got float32 of shape \(40, 3\)"
    ):
        run.predict(run.split("train").features, posterior="laplace-all")


def test_the_networks_code_runs_only_where_it_is_named(images: np.ndarray) -> None:
    with pytest.raises(Untrusted, match="will not run the code of"):
        bnncli.open("ckpt.pt").predict(images, posterior="laplace-all")
