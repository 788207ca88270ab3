"""Quantised weights: exact where the file has all that they are, and one clear line where it has not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from torch import nn

from bnncli.artifacts.features import read_features
from bnncli.errors import DataError
from bnncli.models.checkpoints import load_checkpoint


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def quantised(network: Any, layers: set[str]) -> Any:
    """Dynamically quantised by torch; skipped where that has no int8 kernels."""
    supported = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if not supported:
        pytest.skip("torch has no quantised kernels here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its new home
        torch.backends.quantized.engine = supported[-1]
        return torch.ao.quantization.quantize_dynamic(network, layers, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")
def test_the_head_of_torchs_int8_layers_is_dequantised(cli: Cli, network: Any, tmp_path: Path) -> None:
    small = quantised(network, {"2"})
    torch.save(small.state_dict(), tmp_path / "net.pt")
    checkpoint = load_checkpoint(tmp_path / "net.pt")
    assert list(checkpoint.state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(checkpoint.state["2.weight"], small[2].weight().dequantize())
    assert torch.equal(checkpoint.state["2.bias"], network[2].bias)
    assert "dequantised 1 int8 layers" in checkpoint.notes[0]
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))\n"
    )
    x = torch.rand(7, 4)
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=np.arange(7) % 3)
    data = f"test=npz:{tmp_path}/d.npz"
    done = cli("extract-features", tmp_path / "net.pt", "--model", f"{tmp_path}/net.py:make", "--data", data)
    assert (done.code, "dequantised" in done.stderr) == (0, True)
    content = read_features(tmp_path / "net.pt.bnn/features/test.h5")
    head = small[2].weight().dequantize()
    expected = network[:2](x) @ head.T + network[2].bias
    found = torch.from_numpy(content.features) @ torch.from_numpy(content.head_weight).T + network[2].bias
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_rows_of_bitsandbytes_are_scaled_by_their_largest(network: Any, tmp_path: Path) -> None:
    weight = network[2].weight.detach()
    largest = weight.abs().amax(dim=1)
    whole = torch.round(weight / largest[:, None] * 127).to(torch.int8)
    state = {
        **network.state_dict(),
        "2.weight": whole,
        "2.SCB": largest,
        "2.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    torch.save(state, tmp_path / "net.pt")
    found = load_checkpoint(tmp_path / "net.pt").state
    assert found.keys() == network.state_dict().keys()
    torch.testing.assert_close(found["2.weight"], weight, atol=float(largest.max()) / 253, rtol=0)
    assert torch.equal(found["2.weight"].abs().amax(dim=1), largest)
    torch.save({**state, "2.weight_format": torch.tensor(1, dtype=torch.uint8)}, tmp_path / "net.pt")
    with pytest.raises(DataError, match=r"'2.SCB' has no matching int8 weight;"):
        load_checkpoint(tmp_path / "net.pt")


@pytest.mark.parametrize(
    ("name", "library"), [("l.qweight", "GPTQ or AWQ"), ("l.weight.absmax", "4-bit"), ("l.weight_scale_inv", "float8")]
)
def test_other_quantisations_are_refused_with_their_name(tmp_path: Path, name: str, library: str) -> None:
    torch.save({"state_dict": {"l.weight": torch.ones(2, 2), name: torch.ones(2)}}, tmp_path / "net.pt")
    with pytest.raises(DataError, match=rf"quantised \(.*{library}.*, which is not supported") as caught:
        load_checkpoint(tmp_path / "net.pt")
    assert caught.value.code == "quantised"


@pytest.mark.filterwarnings("ignore")
def test_statically_quantised_weights_name_the_program_that_runs_them(tmp_path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="expected a dense one") as caught:
        load_checkpoint(tmp_path / "a.pt")
    assert "torch.jit.trace and run it unchanged: \0model\0 jit:FILE" in str(caught.value.hint)
