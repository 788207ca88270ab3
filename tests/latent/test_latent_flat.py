"""Steps of a latent binary fit that treat the weights of all layers as one vector, against layers one by one and autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bnncli.latent.factors import Factors, Moments, initial_factors
from bnncli.latent.fit import EstimatorSettings, Inputs, LatentLearner, Minibatch, Plan, differentiate, workspace_of
from bnncli.latent.model import (
    LatentModel,
    SpikeAndSlab,
    bias_divergence,
    bias_gradients,
    factor_gradients,
    weight_divergence,
)
from bnncli.parameters import layouts
from bnncli.parameters.layouts import NetworkLayout
from bnncli.targets.blocks import FeatureBlocks
from bnncli.training.loop import Course, State, train

SMALL = NetworkLayout((4, 3, 5, 2))


def prior_of(num_layers: int, *, differs_by_repeat: bool = False) -> SpikeAndSlab:
    """The same in all layers."""
    rows = [(0.1, 0.2, 0.7), (0.3, -0.1, 1.3)][: 2 if differs_by_repeat else 1]
    parts = torch.tensor(rows, dtype=torch.float64).T.unsqueeze(2).expand(3, len(rows), num_layers)
    return SpikeAndSlab(*parts, bias_sd=0.8)


def told_by_layer(prior: SpikeAndSlab) -> SpikeAndSlab:
    """The same prior, as if its layers differed."""
    other = replace(prior)
    object.__setattr__(other, "is_uniform", False)
    return other


def factors_of(layout: NetworkLayout) -> Factors:
    start = initial_factors(layout, 2, seeded(1), logit_range=(-2, 2), mean_range=1.0).tensors()
    return Factors(**{name: part.double() + 4 * ("rho" in name) for name, part in start.items()})


def step_of(layout: NetworkLayout, prior: SpikeAndSlab, estimator: str, variance: str = "exact") -> dict[str, Tensor]:
    """The gradients of one step, by name."""
    model = LatentModel(layout, factors_of(layout), prior)
    features = torch.randn(7, layout.num_features, generator=seeded(11), dtype=torch.float64)
    labels = torch.randint(0, layout.num_classes, (7,), generator=seeded(12))
    differentiate(
        model, Minibatch(features, labels, 0.2), EstimatorSettings(estimator, variance), seeded(7), workspace_of(model)
    )
    return {name: part.grad for name, part in model.tensors() if part.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() >= {"mean", "rho", "logit", "bias_mean", "bias_rho"}
    for name, part in one.items():
        assert float(part.norm()) > 0, name
        torch.testing.assert_close(part, other[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("differs_by_repeat", [False, True])
@pytest.mark.parametrize(("estimator", "variance"), [("lrt", "exact"), ("lrt", "published"), ("concrete", "exact")])
def test_layers_together_have_the_gradients_of_layers_one_by_one(
    estimator: str, variance: str, differs_by_repeat: bool
) -> None:
    prior = prior_of(3, differs_by_repeat=differs_by_repeat)
    assert prior.is_uniform
    together = step_of(SMALL, prior, estimator, variance)
    assert_same(together, step_of(SMALL, told_by_layer(prior), estimator, variance))


@pytest.mark.parametrize("estimator", ["lrt", "concrete"])
@pytest.mark.parametrize("size", [1, 7, 16, 62])
def test_where_the_vector_is_cut_makes_no_difference(
    estimator: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step_of(SMALL, prior_of(3), estimator)
    monkeypatch.setattr(layouts, "_BLOCK", size)
    pieces = list(SMALL.chunks(torch.arange(SMALL.num_weights).expand(2, -1)))
    assert torch.equal(torch.cat([part[0] for _, part in pieces], dim=1)[1], torch.arange(SMALL.num_weights))
    assert len(pieces) == -(-SMALL.num_weights // max(1, size // 2))
    assert_same(step_of(SMALL, prior_of(3), estimator), whole)


@pytest.mark.parametrize("differs_by_repeat", [False, True])
def test_gradients_of_layers_together_are_those_of_autograd(differs_by_repeat: bool) -> None:
    factors, prior = factors_of(SMALL), prior_of(3, differs_by_repeat=differs_by_repeat)
    learnt = [part.requires_grad_() for part in (factors.mean, factors.rho, factors.logit)]
    weights = [torch.randn(2, SMALL.num_weights, generator=seeded(i), dtype=torch.float64) for i in range(3)]
    alpha, sd = factors.inclusion, factors.sd
    own = (alpha * factors.mean, alpha * sd.square(), alpha * (1 - alpha) * factors.mean.square())
    total = sum((part * weight).sum() for part, weight in zip(own, weights, strict=True))
    total = total + 0.37 * weight_divergence(factors, prior, SMALL).sum()
    found = factor_gradients(factors, Moments(*weights), prior, SMALL, scale=0.37)
    for one, other in zip(found, torch.autograd.grad(total, learnt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradients_of_the_biases_are_those_of_autograd() -> None:
    factors, prior = factors_of(SMALL), prior_of(3)
    learnt = [part.requires_grad_() for part in (factors.bias_mean, factors.bias_rho)]
    to_mean, to_sd = (torch.randn(2, 10, generator=seeded(i), dtype=torch.float64) for i in range(2))
    total = (to_mean * factors.bias_mean + to_sd * factors.bias_sd).sum()
    total = total + 0.37 * bias_divergence(*learnt, prior, SMALL).sum()
    found = bias_gradients(factors, to_mean, to_sd, prior, scale=0.37)
    for one, other in zip(found, torch.autograd.grad(total, learnt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rho", [-200.0, -88.0, 40.0])
def test_gradients_of_the_biases_are_finite_for_any_standard_deviation(rho: float) -> None:
    factors, nothing = Factors(*(torch.full((1, 1), value) for value in (0.0, 0.0, 0.0, 0.3, rho))), torch.zeros(1, 1)
    for part in bias_gradients(factors, nothing, nothing, SpikeAndSlab.constant(1), scale=0.01):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("name", ["inclusion", "slab_mean", "slab_sd"])
def test_a_prior_that_differs_by_layer_is_told_layer_by_layer(name: str) -> None:
    uniform = prior_of(3)
    part = getattr(uniform, name).clone()
    part[0, 2] = 0.45
    other = replace(uniform, **{name: part})
    assert (uniform.is_uniform, other.is_uniform) == (True, False)
    like = torch.zeros(1, dtype=torch.float64)
    assert uniform.layers(like) is uniform.layers(like)
    for index in range(2):
        assert all(map(torch.equal, uniform.layers(like)[index], other.layers(like)[index]))
    assert not all(map(torch.equal, uniform.layers(like)[2], other.layers(like)[2]))
    assert other.layers(like.float())[2].precision.dtype == torch.float32


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("estimator", "most"), [("lrt", 45), ("concrete", 20)])
def test_a_layer_more_costs_the_operations_of_its_activations_alone(estimator: str, most: int) -> None:
    """Products, noise and views; what is done to all weights and biases is done once."""
    counts = []
    for num_layers in (2, 6):
        layout = NetworkLayout((4,) * (num_layers + 1))
        model = LatentModel(layout, factors_of(layout), prior_of(num_layers))
        batch = Minibatch(torch.ones(7, 4, dtype=torch.float64), torch.arange(7) % 4, 0.2)
        space = workspace_of(model)
        for _ in range(2):
            with Operations() as operations:
                differentiate(model, batch, EstimatorSettings(estimator), seeded(7), space)
        counts.append(operations.count)
    assert (counts[1] - counts[0]) / 4 <= most


def test_one_update_for_one_rate_is_that_of_two() -> None:
    features = torch.randn(20, 4, generator=seeded(3))
    states = []
    for choices, num_groups in (({}, 1), ({"inclusion_rate": 0.02, "early_epochs": 1}, 2)):
        factors = Factors(**{name: part.float() for name, part in factors_of(SMALL).tensors().items()})
        plan = Plan(2, 8, 0.02, schedule="cosine", **choices)  # type: ignore[arg-type]
        inputs, labels = Inputs(FeatureBlocks(features, features.device)), torch.arange(20) % 2
        learner = LatentLearner(LatentModel(SMALL, factors, prior_of(3)), inputs, labels, plan, seeded(4))
        assert len(learner.optimizer.param_groups) == num_groups
        kept: list[State] = []
        train(learner, Course(2, 3), what="fit", save=lambda state, is_last, kept=kept: kept.append(state))
        states.append(kept[-1])
    assert states[0].keys() == states[1].keys()
    for name, part in states[0].items():
        assert torch.equal(part, states[1][name]), name
