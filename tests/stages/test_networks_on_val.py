"""What each posterior over a whole network says of its predictive on val, beside the network as trained and at its best temperature."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.artifacts.predictions import read_predictions
from bnncli.cli.execute import run_command_line
from bnncli.evaluation.recommendation import score
from bnncli.session import val_report

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


def make_network(folder: Path, epochs: int) -> Path:
    """A network trained on three clouds, and its features."""
    rng = np.random.default_rng(0)
    words: list[object] = []
    for name, size in SIZES.items():
        y = rng.integers(0, 3, size)
        x = (rng.normal(size=(size, 6)) + 2 * np.eye(6)[y]).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=y)
        words += ["--data", f"{name}=npz:{folder / name}.npz"]
    network = folder / "net.safetensors"
    run("train", network, *MODEL, *words[:2], "--epochs", epochs, "--learning-rate", 0.01)
    run("extract-features", network, *MODEL, *words)
    return network


def run(*words: object) -> None:
    assert run_command_line([str(word) for word in words], io.StringIO()) == 0


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is not sure enough, so that one temperature makes it far better, and a Gaussian under a weak prior."""
    network = make_network(tmp_path_factory.mktemp("network"), 30)
    run("fit-laplace", network, "--layers", "all", "--structure", "diag", *WEAK, "--name", "weak")
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
    (text,) = [text for text in done.json["warnings"] if "predicts val worse" in text]
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
    assert (
        "measuring val scores on 100 of the 150 val examples, drawn at random, because each takes 200 passes of the network"
        in done.stderr
    )
    assert (every["metrics"]["val_num_examples"], metrics["val_num_examples"]) == (150, 100)
    assert metrics["val"]["vi"]["nll"] != every["metrics"]["val"]["vi"]["nll"]
    for name, one in every["metrics"]["val"].items():
        assert metrics["val"][name]["nll"] == pytest.approx(one["nll"], abs=4 * one["standard_error"])
    again = cli(*line, "again").json["metrics"]
    assert again["val"] == metrics["val"]


def test_one_that_may_predict_worse_is_told_of_without_a_warning(cli: Cli, tmp_path: Path) -> None:
    network = make_network(tmp_path, 100)
    words = ("fit-laplace", network, "--layers", "all", "--structure", "diag", "--json", "--prior-precision")
    done = cli(*words, 2.5, "--name", "wide")
    metrics = done.json["metrics"]
    own, gaps = metrics["val"]["laplace"]["nll"], metrics["val_excess"]
    assert not any(gap["is_worse"] for gap in gaps.values())
    assert own > 1.01 * metrics["val"]["network"]["nll"]
    assert (
        f"wide has a higher NLL on val than a simpler choice: {own:.4f} (logit-mc, 256 draws), against " in done.stderr
    )
    assert f"(worse by {gaps['network']['value']:.4f} +- {gaps['network']['standard_error']:.4f})" in done.stderr
    assert "the difference is not significant with 150 examples" in done.stderr
    assert "higher NLL" not in cli(*words, 1e4, "--name", "narrow").stderr
