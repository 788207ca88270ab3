"""Which steps of a latent binary fit replay a captured graph, which do not: with a stand-in for the GPU's graphs, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bnncli.inference.latent_fit import Plan, _Fit
from bnncli.inference.latent_graph import GraphSteps
from bnncli.inference.latent_steps import Batch, Step
from bnncli.latent.factors import initial_factors
from bnncli.latent.layout import NetworkLayout
from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab

LAYOUT = NetworkLayout((3, 2))


class Graph:
    """Runs again what was called between its capture's beginning and end."""

    now: Graph | None = None
    num_captures = num_replays = 0

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        Graph.num_replays += 1
        batch, result = self.called
        step = self.fit.step(batch)
        for mine, new in zip(result, step, strict=True):
            mine.copy_(new)

    called: tuple[Batch, Step]
    fit: Any


class Stream:
    def wait_stream(self, other: Stream) -> None:
        """Nothing runs beside anything here."""


@contextmanager
def entered(*_: object) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        Graph.num_captures, Graph.now = Graph.num_captures + 1, graph
        yield
        Graph.now = None

    Graph.num_captures = Graph.num_replays = 0
    for name, fake in {"CUDAGraph": Graph, "graph": capture, "Stream": Stream, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Captured(_Fit):
    """A fit whose step within a capture is noted, and done by the replay."""

    breaks = False

    def step(self, batch: Batch) -> Step:
        if Graph.now is None:
            return super().step(batch)
        if self.breaks:
            Graph.now = None
            raise RuntimeError("operation not permitted when stream is capturing")
        assert Graph.now.generators == [self.generator]
        result = Step(torch.zeros(self.model.num_repeats), torch.zeros(self.model.num_repeats, 0))
        Graph.now.called, Graph.now.fit = (batch, result), self
        return result


class Silent:
    def advance(self, amount: int = 1, note: str = "") -> None:
        """No progress is shown."""


def fits(*, is_captured: bool, breaks: bool = False, **choices: Any) -> _Fit:
    features = torch.randn(46, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(46) % 2
    factors = initial_factors(LAYOUT, 2, torch.Generator().manual_seed(1))
    model = LatentModel(LAYOUT, factors, SpikeAndSlab.constant(1))
    plan = Plan(epochs=3, batch_size=8, learning_rate=0.01, schedule="cosine", **choices)
    kind = Captured if is_captured else _Fit
    fit = kind(model, (features, labels), plan, torch.Generator().manual_seed(2), None)
    if isinstance(fit, Captured):
        fit.steps, fit.breaks = GraphSteps(fit, 8), breaks
    for _ in range(3):
        fit.run_epoch(Silent())
    return fit


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
    plain, fit = fits(is_captured=False, **choices), fits(is_captured=True, **choices)
    assert (Graph.num_captures, Graph.num_replays) == (captures, replays)
    for name, part in plain.state().items():
        assert torch.equal(part, fit.state()[name]), name


def test_a_capture_that_fails_is_tried_once_and_draws_as_if_it_had_not_been() -> None:
    plain, fit = fits(is_captured=False), fits(is_captured=True, breaks=True)
    assert (Graph.num_captures, Graph.num_replays) == (1, 0)
    for name, part in plain.state().items():
        assert torch.equal(part, fit.state()[name]), name
