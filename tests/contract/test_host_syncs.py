"""How often the host waits for a GPU: in no inner loop, on a pretend one. Twice the steps, the same number of waits."""

from __future__ import annotations

from collections.abc import Callable

import pretend_cuda
import pytest
import torch
from torch import Tensor

from bnncli.inference.hmc import sample_hmc
from bnncli.inference.refine import fit_flow
from bnncli.integrators import load_integrator
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import choose_gradient

GPU = torch.device("cuda:0")
LAYOUT = HeadLayout(3, 4)


def seeded(device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def examples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=seeded()), torch.arange(count) % 3


def target_of(count: int) -> LastLayerTarget:
    features, labels = examples(count)
    return LastLayerTarget(features.to(GPU), labels.to(GPU), LAYOUT, Prior(2.0))


def base() -> Gaussian:
    zeros, prior = torch.zeros(LAYOUT.num_params, dtype=torch.float64), Prior(2.0)
    return Gaussian(zeros, Diag.from_hessian({"hessian.diag": zeros}, prior, LAYOUT), LAYOUT, prior)


def refine(num_steps: int, flow: str) -> None:
    """One epoch of batches."""
    fit_flow(
        target_of(8 * num_steps), base(), generator=seeded(), flow=flow, length=2, epochs=1, batch_size=8, num_draws=2
    )


def fit_lbbnn(num_steps: int, *, estimator: str, is_streamed: bool, shuffles: bool = True) -> Tensor:
    """One epoch of batches; the mean of the weights."""
    layout = NetworkLayout((4, 3))
    multipliers = ()
    if estimator == "mnf":
        multipliers = (initial_model(4, 2, seeded(), length=2, hidden=(5,), device=GPU),)
    factors = initial_factors(layout, 2, seeded(), device=GPU)
    model = LatentModel(layout, factors, SpikeAndSlab.constant(1).to(GPU), multipliers)
    plan = Plan(1, batch_size=8, learning_rate=0.01, settings=EstimatorSettings(estimator), shuffles=shuffles)
    features, labels = examples(8 * num_steps)
    features = features if is_streamed else features.to(GPU)
    fitted, _ = fit_latent(model, features, labels, plan, generator=seeded())
    return fitted.factors.mean.detach().cpu()


def syncs(work: Callable[[int], object], count: int) -> tuple[int, list[str]]:
    with pretend_cuda.pretend() as gpu:
        work(count)
    assert gpu.problems() == []
    return gpu.num_syncs, [f"{count} {site}" for site, count in gpu.syncs.most_common(5)]


def same_syncs(work: Callable[[int], object], count: int) -> None:
    work_of = [syncs(work, times * count) for times in (1, 2)]
    assert work_of[0][0] == work_of[1][0], work_of


@pytest.mark.parametrize("flow", ["radial", "spline"])
def test_training_a_flow_waits_no_more_for_more_steps(flow: str) -> None:
    same_syncs(lambda count: refine(count, flow), 6)


@pytest.mark.parametrize(
    ("estimator", "is_streamed"), [("lrt", False), ("lrt", True), ("mnf", False), ("concrete", False)]
)
def test_fitting_a_latent_network_waits_no_more_for_more_steps(estimator: str, is_streamed: bool) -> None:
    same_syncs(lambda count: fit_lbbnn(count, estimator=estimator, is_streamed=is_streamed), 6)


@pytest.mark.parametrize("shuffles", [False, True])
def test_streamed_features_train_the_same_network(shuffles: bool) -> None:
    with pretend_cuda.pretend() as gpu:
        streamed = fit_lbbnn(6, estimator="lrt", is_streamed=True, shuffles=shuffles)
        assert torch.equal(streamed, fit_lbbnn(6, estimator="lrt", is_streamed=False, shuffles=shuffles))
    assert gpu.problems() == []


def hmc(num_warmup: int, num_draws: int, dynamics: str, gradients: str) -> None:
    target, start = target_of(30), base()
    mode, covariance = start.mean, start.covariance
    how = {"dynamics": dynamics, "coarse": choose_gradient(gradients, target, mode)}
    sizes = {"num_chains": 3, "num_warmup": num_warmup, "num_draws": num_draws}
    sample_hmc(target, mode=mode, covariance=covariance, generator=seeded(), **how, **sizes)


@pytest.mark.parametrize(
    ("dynamics", "gradients"),
    [
        ("split", "float32"),
        ("leapfrog", "float32"),
        ("split", "tf32"),
        pytest.param("split", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_hmc_waits_for_no_draw_and_once_for_a_transition_of_the_warm_up(dynamics: str, gradients: str) -> None:
    same_syncs(lambda count: hmc(4, count, dynamics, gradients), 6)
    (few, _), (many, sites) = (syncs(lambda count: hmc(count, 4, dynamics, gradients), count) for count in (6, 12))
    assert many - few == 6, sites


@pytest.mark.parametrize("name", ["mc", "logit-mc"])
def test_predicting_waits_no_more_for_more_draws(name: str) -> None:
    features, _ = examples(20)

    def predict(num_samples: int) -> None:
        target, posterior = target_of(30), base().to(GPU)
        arguments = {"num_samples": num_samples, "generator": seeded()}
        ready = load_integrator(name).prepare(posterior, target=target, **arguments)
        ready.predict(posterior, features.to(GPU), **arguments)

    same_syncs(predict, 16)
