"""Graphs and classifiers from their files to the features of a run, through the command line."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from torch import nn
from torch.ao import quantization as ao

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.errors import DataError

INPUTS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def network(*behind: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3), *behind).eval()


def export(path: Path, net: nn.Module) -> None:
    rows = torch.export.Dim("n")
    torch.export.save(torch.export.export(net, (torch.zeros(2, 6),), dynamic_shapes=({0: rows},)), path)


@contextmanager
def quietly() -> Iterator[None]:
    """What PyTorch says of its older exporters, and by which class of warning, changes from release to release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script(path: Path, net: nn.Module) -> None:
    with quietly():
        torch.jit.trace(net, torch.zeros(2, 6)).save(str(path))


def to_onnx(path: Path, net: nn.Module) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    with quietly():
        torch.onnx.export(
            net, (torch.zeros(2, 6),), path, dynamo=False, dynamic_axes={"x": {0: "n"}}, input_names=["x"]
        )


FORMS: dict[str, tuple[str, Callable[[Path, nn.Module], None]]] = {
    "export": ("net.pt2", export),
    "jit": ("net.pt", script),
    "onnx": ("net.onnx", to_onnx),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_without_a_linear_head_takes_an_identity_layer(form: str, tmp_path: Path, cli: Cli) -> None:
    file, make = FORMS[form]
    net = network(nn.ReLU())
    make(tmp_path / file, net)
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    line: list[Any] = ["extract-features", tmp_path / "run", "--model", f"{form}:{tmp_path / file}"]
    line += ["--data", f"train=npz:{tmp_path / 'data.npz'}"]
    refused = cli(*line)
    assert (refused.code, "its output does not come from a linear layer" in refused.stderr) == (65, True)
    assert "--last-layer identity puts an identity layer on top of the logits" in refused.stderr
    assert cli(*line, "--last-layer", "identity").code == 0
    with torch.no_grad():
        expected = net(torch.from_numpy(INPUTS)).numpy()
    features = read_features(tmp_path / "run.bnn/features/train.h5").features
    np.testing.assert_allclose(features, expected, atol=1e-6)
    opened = bnncli.open(tmp_path / "run", model=f"{form}:{tmp_path / file}")
    np.testing.assert_array_equal(opened.features(INPUTS), features)
    other = shutil.copy(tmp_path / file, tmp_path / f"other{Path(file).suffix}")
    with pytest.raises(
        DataError, match=r"the files of '.*other.*' have changed or moved since .*train.h5 was created from them"
    ):
        bnncli.open(tmp_path / "run", model=f"{form}:{other}").features(INPUTS)


class Quantised(nn.Module):
    """Layers between the types of whole numbers and of real ones, as static quantisation takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.inward, self.outward = network(), ao.QuantStub(), ao.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outward(self.net(self.inward(x)))
        return y


@pytest.mark.filterwarnings("ignore")
def test_a_statically_quantised_program_runs_as_saved_under_an_identity_layer(cli: Cli, tmp_path: Path) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantised kernels of this kind here")
    net = Quantised().eval()
    net.qconfig = ao.get_default_qconfig("fbgemm")
    prepared = ao.prepare(net)
    prepared(torch.from_numpy(INPUTS))
    whole = ao.convert(prepared)
    torch.jit.trace(whole, torch.zeros(2, 6)).save(str(tmp_path / "net.pt"))
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    data = ("--data", f"train=npz:{tmp_path / 'data.npz'}")
    done = cli(
        "extract-features", tmp_path / "q", "--model", f"jit:{tmp_path / 'net.pt'}", "--last-layer", "identity", *data
    )
    assert done.code == 0
    features = read_features(tmp_path / "q.bnn/features/train.h5").features
    np.testing.assert_array_equal(features, whole(torch.from_numpy(INPUTS)).numpy())


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
