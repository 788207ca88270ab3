"""Estimated seconds of a fit against measured ones."""

import time
from types import SimpleNamespace

import pytest
import torch
from problems.heads import head_target

from bnncli import registry
from bnncli.inference.memory import QUICK_ANYWHERE, automatic_structures, fit_seconds, largest_full
from bnncli.inference.mode import covariance_at
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.devices import speed_of

CORE = speed_of("cpu", threads=1)


@pytest.mark.parametrize(
    ("structure", "layout", "num_examples"),
    [
        ("full", HeadLayout(10, 150), 2000),
        ("block", HeadLayout(10, 400), 1000),
        ("kron", HeadLayout(10, 800), 1000),
        ("kron", HeadLayout(500, 4), 40),
    ],
)
def test_a_covariance_takes_about_as_long_as_estimated(structure: str, layout: HeadLayout, num_examples: int) -> None:
    target = head_target(layout, num_examples, prior=10.0, dtype=torch.float32)
    theta = torch.zeros(layout.num_params, dtype=torch.float64)
    covariance_at(target, theta, structure)  # warms up
    before = time.process_time()
    covariance_at(target, theta, structure)
    measured = time.process_time() - before
    expected = fit_seconds(structure, layout, num_examples=num_examples, speed=CORE, num_modes=0)
    assert 1 / 6 < measured / expected < 6  # of all threads' time; cores differ


def test_every_structure_has_an_estimate_that_grows_with_its_size() -> None:
    for structure in registry.names("curvature"):
        small, large = (
            fit_seconds(structure, HeadLayout(10, size), num_examples=1000, speed=CORE) for size in (100, 1000)
        )
        assert 0 < 5 * small < large
    with pytest.raises(ValueError, match="expected one of full, block, kron, diag"):
        fit_seconds("low-rank", HeadLayout(3, 4), num_examples=10, speed=CORE)


def test_a_search_costs_its_fits_and_modes_and_threads_share_them() -> None:
    layout, sizes = HeadLayout(10, 100), {"num_examples": 1000, "speed": CORE}
    one, mode = (fit_seconds("full", layout, **sizes, num_fits=fits, num_modes=1 - fits) for fits in (1, 0))
    two = {"num_examples": 1000, "speed": speed_of("cpu", threads=2)}
    several = fit_seconds("full", layout, **two, num_fits=7, num_modes=3)
    assert several == pytest.approx((7 * one + 3 * mode) / 2)


def test_a_search_with_kronecker_factors_makes_that_of_the_features_once() -> None:
    layout, sizes = HeadLayout(10, 100), {"num_examples": 1000, "speed": CORE, "num_modes": 0}
    assert fit_seconds("kron", layout, **sizes, num_fits=10) < 1.2 * fit_seconds("kron", layout, **sizes)
    many = HeadLayout(2000, 4)  # the outputs' factor is another at every theta
    assert fit_seconds("kron", many, **sizes, num_fits=10) > 9 * fit_seconds("kron", many, **sizes)
    assert fit_seconds("block", layout, **sizes, num_fits=10) == pytest.approx(
        10 * fit_seconds("block", layout, **sizes)
    )


def test_kronecker_factors_of_very_many_outputs_are_not_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "kron" in automatic_structures(HeadLayout(1000, 4), 2**40, device="cpu", num_draws=128)
    assert automatic_structures(HeadLayout(10_000, 4), 2**40, device="cpu", num_draws=128) == ["block", "diag"]


def test_the_largest_quick_covariance_is_as_large_as_the_device_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert largest_full("cpu") == QUICK_ANYWHERE
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert largest_full("cpu") == 6000
    found = {}
    for capability in ((9, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, told=capability: told)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        )
        found[capability] = largest_full("cuda:0")
    seconds = fit_seconds("full", HeadLayout(100, 256), num_examples=50_000, speed=speed_of("cuda:0"))
    assert QUICK_ANYWHERE < found[8, 9] < 25_700 < found[9, 0]  # what is fast in float32 alone takes long
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fit_seconds("full", HeadLayout(100, 256), num_examples=50_000, speed=speed_of("cuda:0")) < seconds < 1000
