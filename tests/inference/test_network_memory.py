"""Memory of fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from torch import nn

from bnncli.errors import DeviceError
from bnncli.flows._affine_sizes import num_elements
from bnncli.inference import memory, structure_choice
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.memory import NetworkDraws, NetworkPlan
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.system import devices
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


def test_a_block_of_a_gpu_leaves_room_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 8 << 30)
    plan = plan_of(make_layout(), 10_000_000)
    assert plan.automatic_structure(torch.device("cuda")) == "full"


def test_factors_that_do_not_fit_whole_are_advised_to_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(6000, 2, bias=False), nn.Tanh(), nn.Linear(2, 3)).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=(6000,))
    plan = NetworkPlan(layout, 60, 0, CurvatureChoice(), STRUCTURES, is_search=False)
    for name in ("inference.memory", "system.memory"):
        monkeypatch.setattr(f"bnncli.{name}.budget", lambda device: 300 << 20)
    with pytest.raises(DeviceError, match="a kron covariance with 12,009 parameters") as caught:
        plan.require_fit("kron", CPU)
    assert caught.value.hint == "add \0rank\0 64 to \0structure\0 kron, which fits"
    assert dataclasses.replace(plan, choice=CurvatureChoice(rank=64)).require_fit("kron", CPU) < 300 << 20


def test_chains_and_flows_take_what_is_held_of_each() -> None:
    layout = make_layout()
    plan = NetworkDraws(layout, 60, 20, base_bytes=1000)

    def chains(count: int, draws: int = 5) -> int:
        return plan.sampling_bytes(CPU, num_chains=count, num_draws=draws)

    assert chains(2, 100) - chains(2, 50) == 2 * 50 * 16 * layout.num_params  # as they are judged
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
    for module in ("inference.memory", "system.memory"):
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: there)
    with pytest.raises(DeviceError, match="hmc with 8 chains and") as caught:
        plan.require_sampling(CPU, num_chains=8, num_draws=5)
    assert caught.value.hint == "use at most \0chains\0 3"


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


@pytest.mark.parametrize("num_stored", [0, 1500])
def test_the_advised_number_of_draws_fits_and_one_more_does_not(
    monkeypatch: pytest.MonkeyPatch, num_stored: int
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 30 << 30)
    sizes = {"num_stored": num_stored, "device": torch.device("cpu")}
    with pytest.raises(DeviceError, match="1500 draws with 2000000 parameters: needs about") as caught:
        memory.require_draws(2_000_000, num_used=1500, option="--samples", **sizes)
    most = int(str(caught.value.hint).removeprefix("use at most --samples "))
    memory.require_draws(2_000_000, num_used=most, **sizes)
    with pytest.raises(DeviceError, match="parameters: needs about"):
        memory.require_draws(2_000_000, num_used=most + 1, **sizes)


def test_no_content_depends_on_how_much_memory_is_free(
    cli: Any, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, free in (("little", 1 << 24), ("much", 1 << 50)):
        monkeypatch.setattr(devices, "_system_memory", lambda free=free: free)
        monkeypatch.setattr(devices, "_container_memory", lambda folder: 1 << 62)
        outputs = []
        for word, *options in (
            ("fit-laplace", "--structure", "kron", "--prior-precision", 10),
            ("hmc", "--chains", 3, "--warmup", 10, "--draws", 8),
            ("predict", "--posterior", "laplace", "--samples", 50),
        ):
            outputs += cli(word, small_run, *options, "--name", f"{word}-{name}", "--json").json["outputs"]
        judged = cli("diagnose", small_run, "--posterior", "laplace", "--json").json["posteriors"]
        found.append(([one["content_digest"] for one in outputs], judged))
    assert found[0] == found[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stored_draws_that_cannot_be_read_are_to_be_made_anew(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(
        "bnncli.system.memory.available_memory", lambda device: (60 if str(device) == "cpu" else 900) << 30
    )
    memory.require_draws(2_050_000, torch.device(device), num_used=10, num_stored=2560, option="--samples")
    with pytest.raises(DeviceError, match=r"6400 draws with 2050000 .* 42\.0 GiB are available on cpu") as caught:
        memory.require_draws(2_050_000, torch.device(device), num_used=10, num_stored=6400, option="--samples")
    assert caught.value.hint == "reduce the number of draws: hmc with fewer \0chains\0 or \0draws\0"


def test_a_flow_too_large_to_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 2 << 30)
    layout, device = HeadLayout(10, 5000), torch.device("cpu")
    training = memory.training_bytes(layout, num_layer_params=2 * num_elements(layout, "kron"), num_draws=8)
    with pytest.raises(DeviceError, match=r"refining a diag Gaussian with 50010 .* needs about 1\.9 GiB") as caught:
        memory.require_refinement("diag", layout, device, num_draws=8, training=training)
    assert caught.value.hint == "use \0flow\0 radial"
    batches = memory.training_bytes(layout, num_layer_params=0, num_draws=8, batch_size=1000)
    assert batches - memory.training_bytes(layout, num_layer_params=0, num_draws=8) == 4 * 1000 * (5000 + 4 * 8 * 10)


@pytest.mark.parametrize(("at_once", "least"), [(None, 5), (1, 18), (3, 13)])
def test_repeats_that_do_not_fit_are_refused_with_the_number_that_does(
    monkeypatch: pytest.MonkeyPatch, at_once: int | None, least: int
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 1 << 30)
    layout, device = NetworkLayout((784, 400, 600, 10)), torch.device("cpu")
    sizes = {"batch_size": 100, "most_at_once": at_once}
    with pytest.raises(DeviceError, match=r"fit-lbbnn with 50 networks of 560610 parameters") as caught:
        memory.require_latent(layout, device, num_repeats=50, hint="use fewer --repeats", **sizes)
    assert str(caught.value.hint).startswith("use fewer --repeats, at most ")
    most = int(str(caught.value.hint).split()[-4])
    assert most >= least
    memory.require_latent(layout, device, num_repeats=most, hint="", **sizes)
    with pytest.raises(DeviceError):
        memory.require_latent(layout, device, num_repeats=most + 1, hint="", **sizes)


@pytest.mark.parametrize(
    ("layout", "gigabytes", "chosen"),
    [
        (HeadLayout(10, 84), 16, "full"),
        (HeadLayout(10, 599), 16, "full"),  # 6,000 parameters
        (HeadLayout(10, 600), 16, "block"),
        (HeadLayout(100, 256), 16, "block"),
        (HeadLayout(100, 512), 16, "kron"),  # a block Hessian would take longer than the largest full one
        (HeadLayout(1000, 2048), 16, "kron"),
        (HeadLayout(1000, 50_000), 16, "diag"),
        (HeadLayout(10, 599), 1, "block"),
        (HeadLayout(1, 5000), 16, "full"),
    ],
    ids=str,
)
def test_the_automatic_structure_is_the_largest_that_is_sensible(
    monkeypatch: pytest.MonkeyPatch, layout: HeadLayout, gigabytes: int, chosen: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert structure_choice.automatic_structure(layout, gigabytes << 30, device="cpu") == chosen


def test_what_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 4 << 30)
    with pytest.raises(DeviceError, match=r"full covariance with 10000 .*needs about 3.0 GiB.* 2.8 GiB") as caught:
        memory.require_fit("full", HeadLayout(100, 99), torch.device("cpu"))
    assert caught.value.hint == "use \0structure\0 block, the largest that fits"
    assert caught.value.exit == 69


def test_a_million_classes_times_a_hundred_thousand_features_fit_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 64 << 30)
    with pytest.raises(DeviceError, match="diag covariance") as caught:
        memory.require_fit("diag", HeadLayout(1_000_000, 100_000), torch.device("cpu"))
    assert "no structure fits" in str(caught.value.hint)


def test_a_base_too_large_to_refine_is_refused_with_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 2 << 30)
    with pytest.raises(DeviceError, match="refining a full Gaussian with 10000") as caught:
        memory.require_refinement("full", HeadLayout(100, 99), torch.device("cpu"), num_draws=256)
    assert caught.value.hint == "refine a base fitted with fit-laplace \0structure\0 block"
    memory.require_refinement("block", HeadLayout(100, 99), torch.device("cpu"), num_draws=256)


def test_the_advised_number_of_chains_fits_and_one_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 1 << 30)
    layout, device = HeadLayout(10, 84), torch.device("cpu")
    with pytest.raises(DeviceError, match="100000 chains") as caught:
        structure_choice.require_sampling(layout, device, num_chains=100_000)
    most = int(str(caught.value.hint).split()[-1])
    structure_choice.require_sampling(layout, device, num_chains=most)
    with pytest.raises(DeviceError, match="chains"):
        structure_choice.require_sampling(layout, device, num_chains=most + 1)
