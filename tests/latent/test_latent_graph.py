"""Which steps of a latent binary fit replay a captured graph, which do not: on a pretend GPU."""

from __future__ import annotations

import gc
from typing import Any

import pretend_cuda
import pytest
import torch
from problems.outputs import Told

from bnncli.latent.factors import initial_factors
from bnncli.latent.fit import Plan, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import NetworkLayout
from bnncli.progress import SILENT, Progress
from bnncli.training.loop import State

LAYOUT = NetworkLayout((3, 2))


def fit_on(device: str, progress: Progress = SILENT, **choices: Any) -> dict[str, torch.Tensor]:
    """The state after three epochs of six batches, the last of them short."""
    features = torch.randn(46, 3, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(46) % 2
    factors = initial_factors(LAYOUT, 2, torch.Generator().manual_seed(1), device=torch.device(device))
    model = LatentModel(LAYOUT, factors, SpikeAndSlab.constant(1).to(torch.device(device)))
    plan = Plan(epochs=3, batch_size=8, learning_rate=0.01, schedule="cosine", **choices)
    states: list[State] = []
    fit_latent(
        model, features, labels, plan, generator=torch.Generator(device).manual_seed(2), progress=progress,
        save=lambda state, is_last: states.append(state),
    )  # fmt: skip
    assert len(states) == 3
    return {name: part.cpu() for name, part in states[-1].items()}


@pytest.mark.parametrize(
    ("choices", "captures", "replays"),
    [
        ({}, 1, 2 + 5 + 5),  # three ordinary steps of five whole batches first, and the last batch of each epoch
        ({"hyper_prior": True, "early_epochs": 1}, 2, 2 + 2 + 5),  # anew for the prior that was learnt
    ],
)
def test_whole_batches_replay_one_graph_as_long_as_the_prior_is_the_same(
    choices: dict[str, Any], captures: int, replays: int
) -> None:
    plain = fit_on("cpu", **choices)
    with pretend_cuda.pretend() as gpu:
        graphed = fit_on("cuda:0", **choices)
    assert gpu.problems() == []
    assert (gpu.num_captures, gpu.num_replays) == (captures, replays)
    for name, part in plain.items():
        assert torch.equal(part, graphed[name]), name


@pytest.mark.parametrize("failure", [{"capture_error": RuntimeError("not permitted")}, {"captures_nothing": True}])
def test_a_capture_that_fails_is_tried_once_and_draws_as_if_it_had_not_been(failure: dict[str, Any]) -> None:
    plain, progress = fit_on("cpu"), Told()
    with pretend_cuda.pretend(**failure) as gpu:
        graphed = fit_on("cuda:0", progress)
    assert gpu.num_captures == len(progress.lines) == 1
    for name, part in plain.items():
        assert torch.equal(part, graphed[name]), name


@pytest.mark.parametrize("choices", [{}, {"hyper_prior": True, "early_epochs": 1}])
def test_the_graphs_go_when_the_network_is_fitted(choices: dict[str, Any]) -> None:
    """Their memory is wanted by what comes next, which no collection of cycles comes before."""
    gc.disable()
    try:
        with pretend_cuda.pretend() as gpu:
            fit_on("cuda:0", **choices)
            assert gpu.num_captures == 1 + bool(choices)
            assert gpu.num_live_graphs == 0
    finally:
        gc.enable()
