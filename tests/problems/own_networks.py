"""Runs of a network by the user's own code, in the working folder."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CODE = "from torch import nn\n\ndef make():\n    return nn.Sequential({})\n"
TANH = CODE.format("nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)")


def extract_own(code: str, splits: Mapping[str, tuple[np.ndarray, np.ndarray]], *, scale: float = 1.0) -> None:
    """Extract features of splits (inputs, labels) by a fresh network.

    Writes net.py, ckpt.pt with the weights times `scale`, and NAME.npz of each split.
    """
    import torch

    from bnncli.cli.execute import run_command_line

    Path("net.py").write_text(code)
    for name, (x, y) in splits.items():
        np.savez(f"{name}.npz", x=x, y=y)
    space: dict[str, Any] = {}
    exec(code, space)
    torch.manual_seed(0)
    torch.save({name: scale * value for name, value in space["make"]().state_dict().items()}, "ckpt.pt")
    data = [word for name in splits for word in ("--data", f"{name}=npz:{name}.npz")]
    assert run_command_line(["extract-features", "ckpt.pt", "--model", "net.py:make", *data], io.StringIO()) == 0
