"""Features in lower precision: what torch.autocast gives, and how far that is from float32, said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from torch import nn

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.models.features import PrecisionLoss

NETWORK = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, {k}))\n"


def network(classes: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, classes)).eval()


@pytest.fixture(params=[3, 1])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK.format(k=request.param))
    rng = np.random.default_rng(1)
    np.savez("train.npz", x=rng.normal(size=(300, 4)).astype("f4"), y=rng.integers(2, size=300))
    torch.save(network(request.param).state_dict(), "net.pt")
    return network(request.param)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_features_are_those_of_autocast_and_the_difference_is_said(
    cli: Cli, model: nn.Sequential, name: str, dtype: torch.dtype
) -> None:
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:train.npz")
    done = cli(*words, "--autocast", name)
    assert done.code == 0, done.stderr
    stored = read_features(Path("net.pt.bnn/features/train.h5"))
    inputs = torch.from_numpy(np.load("train.npz")["x"])
    with torch.inference_mode():
        exact = model(inputs[:256]).double()
        with torch.autocast("cpu", dtype=dtype):
            features = model[:2](inputs).float()
        logits = features.double() @ model[2].weight.double().T + model[2].bias.double()
    assert np.array_equal(stored.features[:256], features[:256].numpy())
    np.testing.assert_allclose(stored.check_logits, logits[:256].numpy(), atol=1e-6)
    largest = float((logits[:256] - exact).abs().max())
    assert largest > 1e-4
    spread = float(exact.std(dim=1, correction=0).square().mean().sqrt()) if len(exact[0]) > 1 else None
    assert f"at most {largest:.2g}" in done.stderr
    assert spread is None or f"spread of the logits: {spread:.2g}" in done.stderr
    assert "of 256 predicted classes are the same" in done.stderr
    assert cli(*words).code == 73  # those of float32 are others

    # From Python the same network computes the same.
    cli("fit-laplace", "net.pt", "--prior-precision", "1")
    run = bnncli.open("net.pt", model="net.py:make")
    found = run.predict(inputs.numpy(), posterior="map", integrator="plug-in")
    assert np.array_equal(found.probs, run.predict(stored.features, posterior="map", integrator="plug-in").probs)


def test_what_precision_loses_is_measured_on_logits() -> None:
    exact = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.2, 0.1]])
    loss = PrecisionLoss.between(exact + torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.4]]), exact)
    assert loss.num_rows == 3
    assert loss.largest == 0.5
    assert loss.num_same == 2
    assert loss.spread == pytest.approx(np.sqrt(np.mean([0.25, 2.25, 0.0025])))
    single = PrecisionLoss.between(torch.tensor([[-0.1], [2.0]]), torch.tensor([[0.1], [2.0]]))
    assert (single.num_same, single.spread) == (1, pytest.approx(np.sqrt((0.01 + 4) / 2)))


def test_much_loss_is_warned_of(cli: Cli, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands.extract_features import network

    monkeypatch.setattr(network, "MUCH", 1e-6)
    done = cli(
        "extract-features",
        "net.pt",
        "--model",
        "net.py:make",
        "--data",
        "train=npz:train.npz",
        "--autocast",
        "bf16",
        "--json",
    )
    assert any("in bf16" in text for text in done.json["warnings"])


@pytest.mark.parametrize(
    "words", [("--model", "flatten", "--data", "train=npz:train.npz"), ("--from-npz", "train.npz")]
)
def test_without_a_network_there_is_nothing_to_compute(cli: Cli, model: nn.Sequential, words: tuple[str, ...]) -> None:
    refused = cli("extract-features", "net.pt", *words, "--autocast", "bf16")
    assert (refused.code, "--autocast needs a network" in refused.stderr) == (2, True)
