"""Times of training steps: what they are of, and increases against a clock that the test sets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bnncli.experiments import Measurements, flow_time
from bnncli.inference.refine import fit_flow
from bnncli.progress import SILENT

SETTINGS = {"lengths": [2, 4], "steps": 3, "repeats": 2}


def measured(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> tuple[Measurements, list[Any]]:
    """By a clock on which the fits take so long, one after another; and what was fitted."""
    seen: list[Any] = []

    def watched(target: Any, base: Any, **settings: Any) -> Any:
        seen.append((target, settings))
        return fit_flow(target, base, **settings)

    times = itertools.accumulate(itertools.chain.from_iterable((0.0, each) for each in seconds))
    monkeypatch.setattr(flow_time, "fit_flow", watched)
    monkeypatch.setattr(flow_time, "_clock", lambda: next(times))
    return flow_time.measure(SETTINGS, {}, generator=torch.Generator().manual_seed(0), progress=SILENT), seen


def test_times_are_of_a_step_and_increases_within_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, [99.0, 99.0, 3.0, 6.0, 6.0, 9.0])
    assert found.values["seconds_2"].value == pytest.approx(1.5)
    assert found.values["seconds_4"].value == pytest.approx(2.5)
    assert found.values["increase_2_4"].value == pytest.approx(75)
    assert found.values["increase_2_4"].standard_error == pytest.approx(25)


def test_the_layer_has_the_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = measured(monkeypatch, [1.0] * 6)
    target, settings = seen[0]
    assert target.layout.num_params == 850
    assert (target.num_examples, settings["batch_size"], settings["epochs"]) == (384, 128, 1)


def test_a_line_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, [3.0, 6.0] * 3)
    (axes,) = flow_time.draw(found, SETTINGS)["time"].axes
    assert axes.lines[0].get_ydata().tolist() == [1000, 2000]
