"""What the callbacks share, without their libraries."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bnncli.api.commands import METHODS
from bnncli.callbacks.fitting import PosteriorFit
from bnncli.errors import UsageError


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_scores_of_the_network_and_the_posterior(method: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 6)
    y = (x[:, :3] + torch.randn(600, 3)).argmax(1)
    network = nn.Linear(6, 3)
    network.weight.data = 3 * torch.eye(3, 6)
    fit = PosteriorFit(method, seed=3)
    found = fit.fit(network, (x[:300], y[:300]), (x[300:], y[300:]), device="cpu")
    assert {name for name in found if name.endswith(("/nll", "nll_before", "nll_after"))} >= {
        "temperature": {"bnncli/val_nll_before", "bnncli/val_nll_after"},
        "auto": {"bnncli/val/map/plug-in/nll", "bnncli/val/laplace/mc/nll"},
    }.get(method, {"bnncli/val/network/nll", f"bnncli/val/{method}/nll"})
    assert fit.run is not None
    assert method in (*fit.run.posteriors, "auto")
    assert fit.result is not None
    assert fit.result.document["seed"] == 3


@pytest.mark.parametrize(("name", "extra"), [("lightning", "lightning"), ("transformers", "hf")])
def test_a_missing_library_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    found = importlib.util.find_spec
    absent = (name, f"pytorch_{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one in absent else found(one, *rest))
    monkeypatch.delitem(sys.modules, f"bnncli.callbacks.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'bnncli\[{extra}\]'"):
        importlib.import_module(f"bnncli.callbacks.{name}")


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Examples without an order to choose and without a length."""

    def __iter__(self):
        torch.manual_seed(0)
        for row in torch.randn(60, 6):
            yield row, row[:3].argmax()


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
def test_data_may_be_a_stream() -> None:
    network = nn.Linear(6, 3)
    network.weight.data = 3 * torch.eye(3, 6)
    fit = PosteriorFit("temperature")
    assert fit.fit(network, DataLoader(Stream(), 20), DataLoader(Stream(), 20), device="cpu")


def test_a_batch_of_other_than_inputs_and_labels_is_refused() -> None:
    data = DataLoader(TensorDataset(torch.randn(9, 6), torch.zeros(9), torch.zeros(9)), 3)
    with pytest.raises(UsageError, match="train: expected batches of inputs and labels; got 3 parts"):
        PosteriorFit().fit(nn.Linear(6, 3), data, data, device="cpu")
