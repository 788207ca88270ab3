"""--device mps, for which a pretend CUDA device stands in: networks run there in float32, everything else on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.command_line import Cli

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.errors import DeviceError
from bnncli.models.features import move_network
from bnncli.system import devices

MODEL = ("--model", "mlp", "--model-arg", "inputs=16", "--model-arg", "hidden=6", "--model-arg", "classes=3")
DATA = ("--data", "train=npz:train.npz", "--data", "test=npz:test.npz", "--hold-out", "val=train:20")


class Mps:
    """The device under its name, and what was placed on it."""

    def __init__(self, pretend: pretend_cuda.Pretend) -> None:
        self.pretend, self.dtypes = pretend, set[torch.dtype]()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self.dtypes.add(tensor.dtype)
        return pretend_cuda.Pretend.place(self.pretend, tensor)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mps]:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(devices, "MPS", "cuda")
    with pretend_cuda.pretend() as pretend:
        found = Mps(pretend)
        monkeypatch.setattr(pretend, "place", found.place)
        yield found
        assert pretend.problems() == []


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in float64, and a network."""
    from bnncli.models.architectures.mlp import build

    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, count in (("train", 80), ("test", 30)):
        np.savez(f"{name}.npz", x=random.normal(size=(count, 16)), y=np.arange(count) % 3)
    torch.manual_seed(0)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), "net.pt")


def test_no_mps_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for is_built, why in ((False, "was built without MPS"), (True, "no Apple GPU that MPS supports")):
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda is_built=is_built: is_built)
        with pytest.raises(DeviceError, match=f"device. mps: .*{why}"):
            devices.resolve_device("mps")


def test_mps_is_used_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.resolve_device("mps") == torch.device("mps")
    assert devices.device_name("mps") == "mps"
    assert devices.resolve_device("auto") == torch.device("cpu")


@pytest.mark.usefixtures("inputs")
@pytest.mark.long
def test_networks_run_there_in_float32_and_the_rest_on_the_cpu(cli: Cli, mps: Mps) -> None:
    """The same features and predictions as on the CPU, up to rounding."""
    for name, device in (("here", "cpu"), ("there", "cuda")):
        common = ("net.pt", "--run-dir", name, "--device", device)
        done = cli("extract-features", *common, *MODEL, *DATA, "--json").expect(0)
        assert done.json["device"] == device
        assert ("has no float64: networks' forward passes run on it" in done.stderr) == (device == "cuda")
        cli("fit-laplace", *common, "--prior-precision", 1, "--structure", "diag").expect(0)
        before = mps.pretend.num_kernels
        cli(
            "fit-laplace", *common, "--layers", "all", "--prior-precision", 1, "--structure", "diag", "--name", "whole"
        ).expect(0)
        assert mps.pretend.num_kernels == before
        new = ("--data", "new=npz:test.npz", "--posterior", "laplace", "--posterior", "whole", "--table", f"{name}.npz")
        cli("predict", *common, *new).expect(0)
        assert (mps.pretend.num_kernels > before) == (device == "cuda")
    assert mps.dtypes == {torch.float32}
    found = [read_features(Path(name, "features/test.h5")).features for name in ("here", "there")]
    np.testing.assert_allclose(*found, atol=1e-6)
    tables = [np.load(f"{name}.npz")["probability"] for name in ("here", "there")]
    np.testing.assert_allclose(*tables, atol=1e-5)
    headers = [read_header(Path("there", place)) for place in ("features/test.h5", "posteriors/whole.safetensors")]
    assert [header.provenance["device"] for header in headers] == ["cuda", "cpu"]


def test_a_network_of_float64_is_refused() -> None:
    with pytest.raises(DeviceError, match="the network has float64 weights, and mps has no float64"):
        move_network(torch.nn.Linear(2, 2).double(), torch.device("mps"))


def test_a_module_that_lies_there_is_used_there(mps: Mps) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).to("cuda")
    x, y = torch.randn(60, 16), torch.arange(60) % 3
    mps.dtypes.clear()
    run = bnncli.from_torch(module, train=(x.double(), y), device="cuda")
    run.fit_laplace(prior_precision=1.0, structure="diag")
    there = run.predict(x.to("cuda")).probs
    assert mps.dtypes == {torch.float32}
    own = bnncli.from_torch(module.cpu(), train=(x, y), device="cpu")
    own.fit_laplace(prior_precision=1.0, structure="diag")
    np.testing.assert_allclose(there, own.predict(x).probs, atol=1e-5)
