"""What of a network does not vary is held once, and in another precision no longer than it is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.inference.network_memory import trying_bytes
from bnncli.network_curvature._matrices import matrices_of
from bnncli.network_curvature._uses import tried
from bnncli.network_curvature.full import hessian_between
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.parameters.tensor_bytes import _Live, peak_bytes
from bnncli.session.network_splits import check_derivatives
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

WIDTH = 500
REST = WIDTH * WIDTH + 11 * WIDTH + 3  # numbers in all but the last layer
INPUTS = torch.randn(4, 6, generator=seeded(0))


def make_layout(pattern: str) -> ModuleLayout:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3), nn.Linear(3, 3)
        )
    return ModuleLayout.of(ModuleNetwork(module.eval()), pattern, num_outputs=3, input_shape=(6,))


def make_target(layout: ModuleLayout) -> NetworkTarget:
    return NetworkTarget(INPUTS, torch.arange(4) % 3, layout, Prior(1.0))


def gradient(layout: ModuleLayout) -> Tensor:
    return make_target(layout).log_joint_and_grad(layout.trained().unsqueeze(0), dtype=torch.float64)[1]


def uses(layout: ModuleLayout) -> object:
    return tried(layout, layout.trained(), INPUTS, matrices_of(layout))


WORK: list[Callable[[ModuleLayout], object]] = [lambda layout: check_derivatives(layout, INPUTS), gradient, uses]


@pytest.mark.parametrize("work", WORK)
def test_the_rest_of_a_network_is_held_in_float64_only_meanwhile(work: Callable[[ModuleLayout], object]) -> None:
    layout = make_layout("5")
    assert layout.working_bytes > 0  # measured here, not while the work is watched
    with _Live() as live:
        found = work(layout)
    del found
    assert live.peak > 8 * REST
    assert live.now < REST / 100


def make_images(pattern: str) -> ModuleLayout:
    """Of few parameters, whose examples take much."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip
    return ModuleLayout.of(ModuleNetwork(module.eval()), pattern, num_outputs=3, input_shape=(3, 40, 40))


@pytest.mark.parametrize(("make", "pattern"), [(make_layout, "5"), (make_images, "all")])
def test_the_work_in_float64_is_planned(make: Callable[[str], ModuleLayout], pattern: str) -> None:
    layout = make(pattern)
    inputs = torch.randn(2, layout.num_features, generator=seeded(0))
    peak = peak_bytes(lambda: check_derivatives(layout, inputs))
    assert 0.8 < trying_bytes(layout) / peak < 1.25


@pytest.mark.parametrize("pattern", ["7", "all"])
def test_second_derivatives_are_the_same_block_after_block(pattern: str) -> None:
    layout = make_images(pattern)
    inputs = torch.randn(20, layout.num_features, generator=seeded(0))
    target = NetworkTarget(inputs, torch.arange(20) % 3, layout, Prior(1.0), choice=CurvatureChoice("hessian"))
    theta, last = layout.trained(), torch.arange(layout.num_params - 5, layout.num_params)
    check_derivatives(layout, inputs[:2])
    first, second = (hessian_between(target, theta, last) for _ in range(2))
    assert torch.equal(first, second)
    expected = target.second_derivatives(theta)(torch.eye(layout.num_params, dtype=torch.float64)[last])[:, last]
    torch.testing.assert_close(first, expected - torch.eye(5), rtol=1e-4, atol=1e-4)


def test_what_a_transform_makes_is_not_kept_longer() -> None:
    layout = make_layout("5")
    theta = layout.trained()

    def summed(one: Tensor) -> Tensor:
        return layout.logits(INPUTS.double(), one.unsqueeze(0)).square().sum()

    first, second = (torch.func.vjp(torch.func.grad(summed), theta)[1](theta)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert bool(first.any())


def test_parameters_that_vary_are_not_copied_with_the_rest() -> None:
    for pattern, held in (("all", 0), ("5", 8 * REST)):
        layout = make_layout(pattern)
        theta = layout.trained().unsqueeze(0)
        with _Live() as live:
            logits = layout.logits(INPUTS.double(), theta)
        assert live.now == held + logits.nbytes


def test_the_weights_that_vary_are_read_alone() -> None:
    layout = make_layout("5")
    assert peak_bytes(layout.trained) < 1000
