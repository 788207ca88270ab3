"""extract-features --rotate and --corrupt: shifted copies of a split beside it, recorded, up to date, and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation

from bnncli.artifacts.features import read_features
from bnncli.data.shift import Shift
from bnncli.numerics.random import stream_seed

SIZE = 6
NETWORK = """
import torch
def make():
    hidden = torch.nn.Linear(36, 5)
    return torch.nn.Sequential(torch.nn.Flatten(), hidden, torch.nn.Tanh(), torch.nn.Linear(5, 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network and images, in the working folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 12)):
        pixels = random.integers(256, size=(count, SIZE, SIZE), dtype=np.uint8)
        np.savez(f"{name}.npz", x=pixels, y=np.arange(count) % 3)
    torch.manual_seed(0)
    shapes = {"1.weight": (5, 36), "1.bias": (5,), "3.weight": (3, 5), "3.bias": (3,)}
    torch.save({name: torch.randn(shape) / 3 for name, shape in shapes.items()}, "net.pt")
    Path("net.py").write_text(NETWORK)
    return tmp_path


def extract(cli: Cli, *words: str, code: int = 0) -> Invocation:
    run = cli("extract-features", "net.pt", "--model", "net.py:make", *words)
    assert run.code == code, run.stderr
    return run


def features(name: str) -> np.ndarray:
    return read_features(Path("net.pt.bnn/features") / f"{name}.h5").features


def expected(images: np.ndarray) -> np.ndarray:
    """Features of images, by hand."""
    state = {name: tensor.numpy() for name, tensor in torch.load("net.pt").items()}
    return np.tanh(images.reshape(len(images), -1) / np.float32(255) @ state["1.weight"].T + state["1.bias"])


def test_a_rotated_copy_stands_beside_its_split(folder: Path, cli: Cli) -> None:
    extract(cli, "--data", "train=npz:train.npz", "--data", "test=npz:test.npz")
    run = extract(cli, "--data", "rot90=npz:test.npz", "--rotate", "90")
    images = np.load("test.npz")["x"]
    assert np.allclose(features("rot90"), expected(np.rot90(images, axes=(1, 2))), atol=1e-5)
    assert np.allclose(features("test"), expected(images), atol=1e-5)
    assert "share" not in run.stderr
    header = read_features(Path("net.pt.bnn/features/rot90.h5")).header
    assert header is not None
    assert header.provenance["params"]["rotate"] == 90.0
    for command in (("fit-laplace", "net.pt", "--prior-precision", "5"), ("predict", "net.pt"), ("status", "net.pt")):
        assert cli(*command).code == 0


def test_noise_is_that_of_the_seed_and_the_row(folder: Path, cli: Cli) -> None:
    words = ("--data", "noisy=npz:test.npz", "--corrupt", "gaussian-noise:3", "--seed", "5", "--batch-size", "5")
    extract(cli, *words)
    shift = Shift(corrupt="gaussian-noise:3", seed=stream_seed(5, "extract-features/corrupt"))
    images = np.stack([shift.apply(image, row) for row, image in enumerate(np.load("test.npz")["x"])])
    assert np.allclose(features("noisy"), expected(images), atol=1e-5)


def test_the_same_is_up_to_date_and_another_shift_is_not(folder: Path, cli: Cli) -> None:
    words = ("--data", "shifted=npz:test.npz", "--rotate", "30")
    extract(cli, *words)
    assert "up to date" in extract(cli, *words).stderr
    assert "up to date" in extract(cli, *words, "--seed", "9").stderr
    for other in (("--rotate", "40"), ("--rotate", "30", "--corrupt", "jpeg:1"), ()):
        run = cli("extract-features", "net.pt", "--model", "net.py:make", *words[:2], *other)
        assert run.code != 0
        assert "--force" in run.stderr


def test_rotated_training_images_share_rows_with_those_of_training(folder: Path, cli: Cli) -> None:
    extract(cli, "--data", "train=npz:train.npz")
    run = extract(cli, "--data", "turned=npz:train.npz", "--rotate", "30")
    assert "share 40 rows" in run.stderr


def test_posteriors_over_all_layers_see_the_shifted_images(folder: Path, cli: Cli) -> None:
    extract(cli, "--data", "train=npz:train.npz")
    extract(cli, "--data", "noisy=npz:test.npz", "--rotate", "20", "--corrupt", "impulse-noise:4", "--seed", "3")
    run = cli(
        "fit-laplace", "net.pt", "--layers", "all", "--trust-code", "--prior-precision", "5", "--structure", "diag"
    )
    assert run.code == 0, run.stderr
    # The logits of what is read again must be those that were stored.
    run = cli(
        "predict", "net.pt", "--posterior", "laplace-all", "--split", "noisy", "--integrator", "mc", "--trust-code"
    )
    assert run.code == 0, run.stderr


def test_what_is_ready_cannot_be_rotated(folder: Path, cli: Cli) -> None:
    run = cli("extract-features", "other", "--from-npz", "f.npz", "--rotate", "0")
    assert run.code == 2
    assert "--rotate needs a network" in run.stderr
