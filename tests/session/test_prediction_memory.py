"""The plan of predictions over a whole network: what each kind of posterior holds of its draws, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bnncli.errors import DeviceError
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.tensor_bytes import peak_bytes
from bnncli.session.prediction_memory import PosteriorMemory, PredictionSizes, require_prediction

CPU = torch.device("cpu")


def make_memory(kind: str, *, structure: str = "", num_stored: int = 0) -> PosteriorMemory:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 3)).eval().requires_grad_(False)
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=(1, 8, 8))
    return PosteriorMemory(layout, kind, structure, file_bytes=100_000, num_stored=num_stored)


def test_draws_that_are_made_are_held_in_float32_and_those_of_a_sampler_once() -> None:
    flow, samples = make_memory("flow"), make_memory("samples", num_stored=500)
    size = flow.layout.num_params

    def bytes_of(memory: PosteriorMemory, count: int | None) -> int:
        return memory.predicting_bytes(CPU, PredictionSizes("sample", 20, count), has_scores=False)

    assert bytes_of(flow, 4000) - bytes_of(flow, 3000) >= 4 * 1000 * size
    assert bytes_of(samples, None) - bytes_of(samples, 400) == -4 * 400 * size  # all are the file's own
    scored = flow.predicting_bytes(CPU, PredictionSizes("sample", 20, 4000))
    assert scored - bytes_of(flow, 4000) <= 4 * 256 * size  # energies are of draws of their own


def test_draws_of_a_mixture_are_of_the_last_layer_alone() -> None:
    whole = make_memory("mixture")
    own = replace(whole, drawn_params=whole.layout.num_params // 100)
    assert 1000 * 4 * own.drawn_params <= own.sampling_bytes(1000) <= whole.sampling_bytes(1000) / 20
    asked = PredictionSizes("sample", 20, 1000)
    saved = whole.predicting_bytes(CPU, asked) - own.predicting_bytes(CPU, asked)
    assert saved >= 1000 * 4 * (whole.layout.num_params - own.drawn_params)


def test_a_pass_of_examples_takes_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bnncli.session.prediction_memory.process_bytes", lambda work, layout, count, device: work.of(count)
    )
    memory = make_memory("point")
    theta, inputs = memory.layout.trained().float().unsqueeze(0), torch.rand(200, 64)

    def run() -> None:
        with torch.no_grad():
            memory.layout.logits(inputs.clone(), theta)

    run()  # what a network keeps from its first call on
    assert memory.pass_bytes(CPU, 200) == pytest.approx(peak_bytes(run), rel=0.02)


def test_predictions_without_room_are_refused_with_how_many_draws_have(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = make_memory("flow"), PredictionSizes("sample", 20, 2000)
    there = require_prediction(memory, PredictionSizes("sample", 20, 700), CPU, what="predicting")
    for module in ("session.prediction_memory", "system.memory"):
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: there)
    with pytest.raises(DeviceError, match="predicting: needs about") as caught:
        require_prediction(memory, asked, CPU, what="predicting")
    assert caught.value.hint == "use at most \0samples\0 700"
