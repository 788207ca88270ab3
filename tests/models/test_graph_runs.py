"""Graphs and classifiers from their files to the features of a run, through the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from torch import nn

from bnncli.storage.features import read_features

INPUTS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def network(*behind: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3), *behind).eval()


def export(path: Path, net: nn.Module) -> None:
    rows = torch.export.Dim("n")
    torch.export.save(torch.export.export(net, (torch.zeros(2, 6),), dynamic_shapes=({0: rows},)), path)


def script(path: Path, net: nn.Module) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        torch.jit.trace(net, torch.zeros(2, 6)).save(str(path))


def to_onnx(path: Path, net: nn.Module) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    with pytest.warns(DeprecationWarning, match="legacy TorchScript-based"):
        torch.onnx.export(
            net, (torch.zeros(2, 6),), path, dynamo=False, dynamic_axes={"x": {0: "n"}}, input_names=["x"]
        )


FORMS: dict[str, tuple[str, Callable[[Path, nn.Module], None]]] = {
    "export": ("net.pt2", export),
    "jit": ("net.pt", script),
    "onnx": ("net.onnx", to_onnx),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_makes_a_run_which_a_change_of_its_file_makes_stale(form: str, tmp_path: Path, cli: Cli) -> None:
    file, make = FORMS[form]
    net = network(nn.LogSoftmax(1))
    make(tmp_path / file, net)
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    line: list[Any] = ["extract-features", tmp_path / "run", "--model", f"{form}:{tmp_path / file}"]
    line += ["--data", f"train=npz:{tmp_path / 'data.npz'}", "--batch-size", 16]
    done = cli(*line)
    assert done.code == 0, done.stderr
    assert "log-softmax" in done.stderr
    made = read_features(tmp_path / "run.bnn/features/train.h5")
    assert made.head_weight is not None
    assert made.head_bias is not None
    with torch.inference_mode():
        expected = net(torch.from_numpy(INPUTS))
    logits = torch.from_numpy(made.features @ made.head_weight.T + made.head_bias)
    torch.testing.assert_close(logits.log_softmax(1), expected, atol=1e-5, rtol=0)
    assert "up to date" in cli(*line).stderr
    make(tmp_path / file, network(nn.LogSoftmax(1)).apply(lambda layer: layer.register_buffer("other", torch.ones(1))))
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    again = cli("fit-laplace", tmp_path / "run", "--prior-precision", 1)
    assert again.code == 65, again.stderr
    assert f"{tmp_path / file}" in again.stderr or file in again.stderr
