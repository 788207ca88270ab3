"""What each posterior over a whole network says of its predictive on val, beside the network as trained and at its best temperature."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.cli.execute import run_command_line
from bnncli.evaluation.excess import score
from bnncli.run import val_report
from bnncli.storage.predictions import read_predictions

MODEL = ("--model", "mlp", "--model-arg", "inputs=6", "--model-arg", "hidden=8", "--model-arg", "classes=3")
SIZES = {"train": 150, "val": 150}
WEAK, STRONG = ("--prior-precision", 1e-4), ("--prior-precision", 1e4)
BRIEF = ("--chains", 4, "--warmup", 4, "--draws", 8)
# A prior under which each is worse than the network: one that pulls the weights to zero, or that says nothing of them.
FITS: dict[str, tuple[object, ...]] = {
    "laplace": ("fit-laplace", "--structure", "diag", *WEAK),
    "refine": ("refine", "--base", "weak", "--epochs", 1, "--elbo-draws", 4),
    "hmc": ("hmc", *STRONG, *BRIEF),
    "vi": ("fit-vi", "--epochs", 40, *STRONG),
    "swag": ("fit-swag", "--warmup", 10, "--epochs", 10, *STRONG),
    "sghmc": (
        "fit-sghmc",
        "--sampler",
        "sghmc",
        "--epochs",
        40,
        "--exploration",
        0.5,
        "--chains",
        2,
        "--draws",
        20,
        *STRONG,
    ),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained for a while on three clouds, its features, and a Gaussian under a weak prior."""
    folder = tmp_path_factory.mktemp("network")
    rng = np.random.default_rng(0)
    words: list[object] = []
    for name, size in SIZES.items():
        y = rng.integers(0, 3, size)
        x = (rng.normal(size=(size, 6)) + 2 * np.eye(6)[y]).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=y)
        words += ["--data", f"{name}=npz:{folder / name}.npz"]
    network = folder / "net.safetensors"
    for line in (
        ("train", network, *MODEL, *words[:2], "--epochs", 30, "--learning-rate", 0.01),
        ("extract-features", network, *MODEL, *words),
        ("fit-laplace", network, "--layers", "all", "--structure", "diag", *WEAK, "--name", "weak"),
    ):
        assert run_command_line([str(word) for word in line], io.StringIO()) == 0
    return network


@pytest.mark.parametrize("method", FITS)
def test_one_that_predicts_worse_than_what_is_simpler_is_warned_of(cli: Cli, network: Path, method: str) -> None:
    command, *words = FITS[method]
    done = cli(command, network, "--layers", "all", *words, "--json")
    assert done.code == 0, done.stderr
    found, excess = done.json["metrics"]["val"], done.json["metrics"]["val_excess"]
    assert {"network", "temperature"} <= set(excess)
    assert excess["temperature"]["is_worse"]
    assert excess["temperature"]["value"] == pytest.approx(found[method]["nll"] - found["temperature"]["nll"])
    (text,) = [text for text in done.json["warnings"] if "predicts worse on val" in text]
    assert f"bnncli fit-temperature {network}" in text
    used = found[method]["integrator"]
    words = ("--posterior", f"{method}-all", "--split", "val", "--integrator", used)
    assert cli("predict", network, *words).code == 0
    folder = network.with_name(f"{network.name}.bnn") / "predictions"
    content = read_predictions(folder / f"{method}-all.{used}/val.h5")
    expected = score(method, np.asarray(content.probs), np.asarray(content.labels))
    assert found[method]["nll"] == pytest.approx(expected.nll, rel=1e-5)


def test_passes_that_take_long_are_of_some_examples_and_it_is_said(
    cli: Cli, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *words = FITS["vi"]
    line = (command, network, "--layers", "all", *words, "--json", "--name")
    every = cli(*line, "every").json
    monkeypatch.setitem(val_report._MOST_NUMBERS, "cpu", 1)
    done = cli(*line, "some")
    metrics = done.json["metrics"]
    assert "measured on 100 of its 150 examples, at random: each takes 200 passes of the network" in done.stderr
    assert (every["metrics"]["val_num_examples"], metrics["val_num_examples"]) == (150, 100)
    assert metrics["val"]["vi"]["nll"] != every["metrics"]["val"]["vi"]["nll"]
    for name, one in every["metrics"]["val"].items():
        assert metrics["val"][name]["nll"] == pytest.approx(one["nll"], abs=4 * one["standard_error"])
    again = cli(*line, "again").json["metrics"]
    assert again["val"] == metrics["val"]
