"""Code of the user's in a process that is not ours: folders are kept apart, and the process is left as it was."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

import bnncli
from bnncli.errors import UsageError

NETWORK = """
import os, signal, sys
from torch import nn
import blocks
from parts.sizes import WIDTH

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        import late
        if os.environ.get("PRESSED") == "forward":
            os.kill(os.getpid(), signal.SIGINT)
        if os.environ.get("EXITS") == "forward":
            sys.exit(3)
        return self.last(late.scaled(blocks.act(self.hidden(x))))

def make():
    if os.environ.get("EXITS") == "factory":
        sys.exit(3)
    return Network()
"""


def make_folder(folder: Path, activation: str, scale: float) -> None:
    (folder / "parts").mkdir(parents=True)
    (folder / "net.py").write_text(NETWORK)
    (folder / "blocks.py").write_text(f"import torch\nact = torch.{activation}\n")
    (folder / "late.py").write_text(f"def scaled(x):\n    return {scale} * x\n")
    (folder / "parts/sizes.py").write_text("WIDTH = 5\n")
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden.weight": (5, 6), "hidden.bias": (5,), "last.weight": (3, 5), "last.bias": (3,)}
    torch.save({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / "ckpt.pt")
    rng = np.random.default_rng(0)
    np.savez(folder / "train.npz", x=rng.normal(size=(20, 6)).astype(np.float32), y=np.arange(20) % 3)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of the same modules that do other things."""
    found = tmp_path / "a", tmp_path / "b"
    for folder, activation, scale in zip(found, ("tanh", "relu"), (1.0, 2.0), strict=True):
        make_folder(folder, activation, scale)
    return found


def opened(folder: Path) -> bnncli.api.OpenedRun:
    return bnncli.open(folder / "ckpt.pt", model=f"{folder}/net.py:make")


def inputs_of(folder: Path) -> np.ndarray:
    return np.load(folder / "train.npz")["x"]


def expected_features(folder: Path, activation: str, scale: float) -> np.ndarray:
    state = torch.load(folder / "ckpt.pt", weights_only=True)
    hidden = torch.from_numpy(inputs_of(folder)) @ state["hidden.weight"].T + state["hidden.bias"]
    return (scale * getattr(torch, activation)(hidden)).numpy()


@pytest.fixture
def runs(folders: tuple[Path, Path], cli: Cli) -> tuple[Path, Path]:
    """The folders with a run each, whose features a command made in a process with no other code."""
    kept = list(sys.path), dict(sys.modules)
    for folder in folders:
        given = ("--model", f"{folder}/net.py:make", "--data", f"train=npz:{folder}/train.npz")
        assert cli("extract-features", folder / "ckpt.pt", *given).code == 0
        sys.path[:] = kept[0]
        for name in set(sys.modules) & {"net", "blocks", "late", "parts", "parts.sizes"}:
            del sys.modules[name]
    return folders


def test_folders_of_the_same_modules_are_kept_apart(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type(sys)("blocks")
    monkeypatch.setitem(sys.modules, "blocks", mine)
    path, names = list(sys.path), set(sys.modules)
    both = [opened(folder) for folder in runs]
    for _ in range(2):
        for run, folder, activation, scale in zip(both, runs, ("tanh", "relu"), (1.0, 2.0), strict=True):
            found = run.features(inputs_of(folder))
            np.testing.assert_allclose(found, expected_features(folder, activation, scale), atol=1e-5)
    assert sys.path == path
    assert sys.modules["blocks"] is mine
    assert not (set(sys.modules) - names) & {"net", "late", "parts", "parts.sizes"}


def test_pressing_ctrl_c_in_the_users_code_is_an_interruption(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, x = opened(runs[0]), inputs_of(runs[0])
    monkeypatch.setenv("PRESSED", "forward")
    before, handler = list(sys.path), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.features(x)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.path == before
    (runs[1] / "blocks.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):  # on import
        opened(runs[1]).features(x)


@pytest.mark.parametrize("where", ["factory", "forward"])
def test_code_that_exits_does_not_end_the_process(
    runs: tuple[Path, Path], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXITS", where)
    with pytest.raises(UsageError, match=r"^user code called exit\(3\)$"):
        opened(runs[0]).features(inputs_of(runs[0]))
