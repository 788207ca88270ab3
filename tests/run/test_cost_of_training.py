"""What a posterior cost besides itself: the training of the checkpoint, where that says so, and of an ensemble's members."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.session.posteriors import TotalCost, total_cost


@pytest.fixture
def laplace(finished_run: Path) -> Header:
    return read_header(finished_run.with_name("small.bnn") / "posteriors/laplace.safetensors")


def test_training_that_nobody_told_of_is_unknown(laplace: Header) -> None:
    found = total_cost(laplace)
    assert found.training is None
    assert found.network == 0
    assert found.head is not None
    assert found.head > 0


def test_training_is_that_of_the_network_beside_it(laplace: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    network = read_header(laplace.path.with_name("map.safetensors"))
    told = replace(network, meta={**network.meta, "gradient_passes": 100})
    monkeypatch.setattr(
        "bnncli.session.posteriors.read_header", lambda path: told if path == network.path else read_header(path)
    )
    assert total_cost(laplace).training == 100
    assert total_cost(told) == TotalCost(0.0, 0.0, 100.0)


@pytest.mark.parametrize("passes", [None, 300])
def test_an_ensemble_costs_the_training_of_its_members(laplace: Header, passes: int | None) -> None:
    header = replace(laplace, meta={**laplace.meta, "method": "ensemble", "metrics": {"gradient_passes": passes}})
    assert total_cost(header) == (TotalCost(None, None, None) if passes is None else TotalCost(0.0, 300.0, 0.0))
