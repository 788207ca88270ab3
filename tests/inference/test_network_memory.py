"""The plan of a fit's memory: monotone in sizes, honoured by blocks, and no block changes a number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems.seeds import seeded
from torch import nn
from torch.nn.utils import parametrizations

from bnncli.curvature import ggn
from bnncli.errors import DeviceError
from bnncli.inference import network_memory
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import CLIMBING_VECTORS
from bnncli.inference.network_memory import NetworkDraws, NetworkPlan, gradient_bytes, prediction_bytes
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.parameters.tensor_bytes import peak_bytes
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

CPU = torch.device("cpu")
STRUCTURES = ("full", "block", "ekfac", "kron", "low-rank", "diag")


def make_layout(width: int = 4) -> ModuleLayout:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, width), nn.ReLU(), nn.Linear(width, 3)
        )  # fmt: skip
    return ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=3, input_shape=(1, 8, 8))


def make_target(layout: ModuleLayout, count: int) -> NetworkTarget:
    inputs = torch.rand(count, 64, generator=seeded(1))
    return NetworkTarget(inputs, torch.arange(count) % 3, layout, Prior(5.0), choice=CurvatureChoice(rank=3))


def plan_of(layout: ModuleLayout, count: int = 60, held: int = 0, *, searches: bool = False) -> NetworkPlan:
    return NetworkPlan(layout, count, held, CurvatureChoice(rank=3), STRUCTURES, searches)


@pytest.mark.parametrize("structure", ["full", "ekfac", "diag"])
def test_more_examples_draws_and_parameters_take_more(structure: str) -> None:
    layout = make_layout()
    found = plan_of(layout).fit_bytes(structure, CPU)
    assert found > plan_of(layout, 30).fit_bytes(structure, CPU)
    assert found < plan_of(layout, held=500).fit_bytes(structure, CPU)
    assert found < plan_of(layout, held=500, searches=True).fit_bytes(structure, CPU)
    assert found < plan_of(make_layout(8)).fit_bytes(structure, CPU)


@pytest.mark.parametrize(("structure", "first"), [("ekfac", "kron"), ("subnetwork", "diag")])
def test_a_hessian_takes_at_least_what_it_begins_with(structure: str, first: str) -> None:
    plan = plan_of(make_layout(), 3000)
    plan.known[first] = 2**40  # more than anything that is measured
    assert plan._hessian_bytes(structure, CPU) == 2**40


def test_the_search_for_a_mode_takes_its_pairs_besides() -> None:
    layout = make_layout()
    at_checkpoint = plan_of(layout)
    at_mode = dataclasses.replace(at_checkpoint, is_climb=True)
    more = at_mode.fit_bytes("diag", CPU) - at_checkpoint.fit_bytes("diag", CPU)
    assert more >= 8 * CLIMBING_VECTORS * layout.num_params


def test_chains_and_flows_take_what_is_held_of_each() -> None:
    layout = make_layout()
    plan = NetworkDraws(layout, 60, 20, base_bytes=1000)

    def chains(count: int, draws: int = 5) -> int:
        return plan.sampling_bytes(CPU, num_chains=count, num_draws=draws)

    assert chains(2, 15) - chains(2) == 2 * 10 * 4 * layout.num_params  # as they are read from their file
    assert chains(64) - chains(32) >= 32 * 8 * 6 * layout.num_params
    flow = {"training": 0, "num_drawn": 1, "num_judging": 16, "num_predicting": 1000}
    assert plan.refinement_bytes(CPU, **flow) >= 4 * 1000 * layout.num_params
    most = plan.refinement_bytes(CPU, **{**flow, "training": 1 << 30})
    assert most >= 1 << 30
    with_more = dataclasses.replace(plan, base_bytes=3000)
    assert with_more.refinement_bytes(CPU, **flow) - plan.refinement_bytes(CPU, **flow) == 5000


def test_chains_that_do_not_fit_are_refused_with_how_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = NetworkDraws(make_layout(), 60, 20, base_bytes=1000)
    there = plan.sampling_bytes(CPU, num_chains=3, num_draws=5)
    for module in ("inference.network_draw_memory", "machine.memory"):
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: there)
    with pytest.raises(DeviceError, match="hmc with 8 chains and") as caught:
        plan.require_sampling(CPU, num_chains=8, num_draws=5)
    assert caught.value.hint == "use at most \0chains\0 3"


@pytest.mark.parametrize("structure", ["block", "kron", "diag"])
def test_the_making_of_a_block_takes_what_was_planned(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        network_memory, "with_kernels", lambda work, layout, count, device: work.of(count)
    )  # not what a CPU's kernels take
    layout, count = make_layout(), 128
    target, theta = make_target(layout, count), layout.trained()
    ggn(target, theta, structure)  # what a network keeps from its first call on
    planned = plan_of(layout, count)._measured(structure, CPU)
    assert 0.8 < planned / peak_bytes(lambda: ggn(target, theta, structure)) < 1.2


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_smaller_budget_makes_smaller_blocks_and_the_same_numbers(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout()
    target = make_target(layout, 60)
    start = layout.trained()
    whole = fit_gaussian(target, start=start, structure=structure, center="checkpoint").gaussian
    monkeypatch.setattr("bnncli.targets.network.budget", lambda device: 4 * 12 * layout.working_bytes)
    small = make_target(layout, 60)
    assert (target.rows_at_once(1, torch.float32), small.rows_at_once(1, torch.float32)) == (60, 12)
    found = fit_gaussian(small, start=start, structure=structure, center="checkpoint").gaussian
    ones = torch.ones(1, layout.num_params, dtype=torch.float64)
    torch.testing.assert_close(found.covariance.unwhiten(ones), whole.covariance.unwhiten(ones), rtol=1e-6, atol=1e-6)
    value, gradient = small.log_joint_and_grad(start[None])
    torch.testing.assert_close(value, target.log_joint_and_grad(start[None])[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradient, target.log_joint_and_grad(start[None])[1], rtol=1e-6, atol=1e-5)


def test_weights_that_are_computed_anew_are_planned_with_the_gradient() -> None:
    def layout_of(last: nn.Linear) -> ModuleLayout:
        module = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), last).eval()
        return ModuleLayout.of(ModuleNetwork(module), "2", num_outputs=300, input_shape=(4,))

    plain, normed = (
        gradient_bytes(layout_of(last), 3, torch.device("meta"), torch.float32)
        for last in (nn.Linear(300, 300), parametrizations.weight_norm(nn.Linear(300, 300)))
    )
    assert normed - plain > 0.9 * 4 * 300 * 300  # the weight


def test_parameters_of_no_layer_are_planned_with_their_jacobian() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(400, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    own, layer = (
        prediction_bytes(
            ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=3, input_shape=(400,)), 5, "diag", torch.device("meta")
        )
        for module in (Product(), nn.Linear(400, 3, bias=False))
    )  # fmt: skip
    assert own - layer >= 4 * 5 * 3 * 1200
