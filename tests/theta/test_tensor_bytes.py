"""Bytes that work holds at its peak, and what an example of a network takes, against sizes known by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bnncli.parameters.module import ModuleLayout, ModuleNetwork, activation_bytes, laid_out_bytes
from bnncli.parameters.tensor_bytes import _Live, growth, peak_bytes


def test_the_peak_is_of_what_is_held_at_once() -> None:
    def work() -> None:
        first = torch.ones(1000)
        del first
        second = torch.ones(500)
        third = second * 2  # views and what is written in place take nothing
        third.view(2, 250).add_(second.view(2, 250))

    assert peak_bytes(work) == 4 * 1000


def test_views_of_what_was_there_take_nothing() -> None:
    there = torch.ones(1000, 10)
    assert peak_bytes(lambda: torch.ones(2, 10) @ there.T) == 4 * (2 * 10 + 2 * 1000)


def test_sparse_tensors_are_no_obstacle() -> None:
    sparse = torch.eye(5).to_sparse()
    assert peak_bytes(lambda: torch.sparse.mm(sparse, torch.ones(5, 2))) >= 2 * 4 * 10


def test_growth_is_measured_and_extrapolated() -> None:
    found = growth(lambda count: torch.ones(10 + 3 * count), 2, 6)
    assert (found.fixed, found.each, found.of(100)) == (40, 12, 1240)


def test_a_sum_in_another_precision_copies_its_input_on_a_cpu() -> None:
    numbers = torch.ones(1000)
    assert peak_bytes(lambda: numbers.sum(dtype=torch.float64)) == 8 * 1000
    assert peak_bytes(lambda: numbers.sum()) == 4


def test_small_storages_that_are_gone_before_the_peak_leave_their_holes() -> None:
    def work(count: int) -> object:
        some = [torch.ones(100 * count) for _ in range(3)]  # 400 bytes an example each
        some.clear()
        return torch.ones(1000 * count), torch.ones(50 * count)

    found = growth(work, 2, 6, small=401)
    assert found.of(10) == 42_000
    assert found.holes(10, 4001) == 12_000 - 2_000
    assert found.times(2).holes(10, 8001) == 24_000 - 4_000
    assert growth(work, 2, 6).holes(10, 4001) == 2_000


def test_what_lies_in_small_storages_is_told_of_any_number_of_examples() -> None:
    def work(count: int) -> object:
        return [torch.ones(100 * count), torch.ones(300 * count)]  # 400 and 1,200 bytes an example

    found = growth(work, 2, 6)
    assert found.holes(10, 4001) == 4000
    assert found.holes(10, 4000) == 0
    assert found.holes(10, 12_001) == found.of(10) == 16_000
    assert found.times(2).holes(10, 8001) == 8000


def test_what_autograd_keeps_is_counted() -> None:
    module = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 3)).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=(10,))
    kept = 4 * (10 + 100 + 3)
    assert kept <= layout.working_bytes <= kept + 4 * (100 + 100 + 3)  # what comes back to both sides of tanh, at most


def test_nothing_is_held_of_what_was_measured() -> None:
    module = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 3), nn.Sigmoid()).eval()
    with _Live() as live:
        activation_bytes(ModuleNetwork(module), (10,))
    assert live.peak > 0
    assert not live.sizes


@pytest.mark.parametrize(("capability", "filled"), [("AVX512", 16), ("AVX2", 8), ("DEFAULT", 8)])
def test_a_convolutions_channels_are_filled_up(capability: str, filled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).eval()
    assert laid_out_bytes(ModuleNetwork(module), (1, 4, 4)) == 4 * filled * 2 * 2
    assert laid_out_bytes(ModuleNetwork(nn.Linear(4, 2).eval()), (4,)) == 0


def test_what_modules_give_is_counted_at_each_call() -> None:
    shared = nn.Linear(4, 4)
    network = ModuleNetwork(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3)).eval())
    assert ModuleLayout.of(network, num_outputs=3, input_shape=(4,)).own_outputs == 4 + 4 + 3
