"""A run of a small network on images of 4 x 4, in the working folder, and what its tests ask of tables."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bnncli.models.architectures.mlp import build
from problems.command_line import Cli

SPLITS = ("--model", "mlp", "--data", "train=npz:train.npz", "--data", "test=npz:test.npz")


def make_run(cli: Cli, *options: str) -> None:
    """Data, the network `net.pt`, its features and `laplace`; options of extract-features."""
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 300), ("labelled", 20)):
        pixels = random.integers(256, size=(count, 4, 4), dtype=np.uint8)
        np.savez(f"{name}.npz", x=pixels, y=np.arange(count) % 3)
    torch.manual_seed(0)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), "net.pt")
    assert cli("extract-features", "net.pt", *SPLITS, *options).code == 0
    assert cli("fit-laplace", "net.pt", "--prior-precision", 1).code == 0


def draw(path: Path, seed: int) -> None:
    """An image file of 4 x 4."""
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(256, size=(4, 4), dtype=np.uint8)).save(path)


def rows(name: str) -> list[dict[str, str]]:
    """Those of a table."""
    return list(csv.DictReader(io.StringIO(Path(name).read_bytes().decode())))
