"""Refinement over a network's parameters: against the last layer's, quadrature and finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.covariances.diag import Diag
from bnncli.covariances.full import Full
from bnncli.flows import build_layers
from bnncli.inference.elbo import elbo
from bnncli.inference.refine import Objective, fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

N = 30


class TwoWeights(nn.Module):
    """The logit of the second class is b tanh(a x)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.9))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.b * torch.tanh(self.a * inputs)


def network_target(module: nn.Module, num_inputs: int, num_outputs: int) -> NetworkTarget:
    inputs = torch.randn(N, num_inputs, generator=seeded(1), dtype=torch.float64)
    labels = (inputs[:, 0] + 0.5 * torch.randn(N, generator=seeded(2)) > 0).long()
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=num_outputs, input_shape=(num_inputs,))
    return NetworkTarget(inputs, labels, layout, Prior(0.5))


def around(target: NetworkTarget, variance: float = 0.3) -> Gaussian:
    center = target.layout.trained()
    return Gaussian(center, Diag(torch.full_like(center, variance)), target.layout, target.prior)


@pytest.mark.parametrize("flow", ["radial", "affine"])
def test_a_linear_network_is_refined_as_the_last_layer(flow: str) -> None:
    target = network_target(nn.Linear(3, 2), 3, 2)
    last = LastLayerTarget(target.inputs, target.labels, HeadLayout(2, 3), target.prior)
    base = around(target)
    settings = {"scale": "low-rank", "rank": 2} if flow == "affine" else {}
    plan: dict[str, Any] = {"flow": flow, "epochs": 8, "batch_size": 8, "num_draws": 3, "learning_rate": 0.02}
    fits = [
        fit_flow(one, Gaussian(base.mean, base.covariance, one.layout), generator=seeded(), settings=settings, **plan)
        for one in (target, last)
    ]
    torch.testing.assert_close(fits[0].history, fits[1].history)
    theta = base.sample(10, seeded(3)).double()
    torch.testing.assert_close(fits[0].posterior.log_density(theta), fits[1].posterior.log_density(theta))
    assert fits[0].history[-1] > fits[0].history[0] + 1


def test_two_weights_are_refined_to_what_quadrature_says() -> None:
    target = network_target(TwoWeights(), 1, 1)
    base = around(target)
    fit = fit_flow(
        target, base, generator=seeded(), flow="planar", length=4, epochs=60, batch_size=N, num_draws=16, learning_rate=0.05
    )  # fmt: skip
    axis = torch.linspace(-9, 9, 241, dtype=torch.float64)
    theta = torch.cartesian_prod(axis, axis)
    cell = 2 * math.log(float(axis[1] - axis[0]))
    log_q, log_p = fit.posterior.log_density(theta), target.log_joint(theta)
    q = (log_q + cell).exp()
    assert float(q.sum()) == pytest.approx(1, abs=1e-3)
    value = float((q * (log_p - log_q)).sum())
    found = elbo(target, fit.posterior, generator=seeded(4), num_samples=2000)
    assert found.value == pytest.approx(value, abs=5 * found.standard_error)
    evidence = float((log_p + cell).logsumexp(0))
    before = elbo(target, base, generator=seeded(4), num_samples=2000).value
    assert before < value - 0.5 < evidence - 0.5


@pytest.mark.parametrize("is_minibatch", [False, True])
def test_the_gradient_is_that_of_finite_differences(is_minibatch: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    target = network_target(module, 2, 2)
    size = target.layout.num_params
    root = torch.randn(size, size, generator=seeded(5), dtype=torch.float64).tril(-1) * 0.1
    base = Gaussian(target.layout.trained(), Full(root + 0.3 * torch.eye(size)), target.layout)
    (layer,) = build_layers("planar", target.layout, seeded(), length=1)
    noise = base.noise(3, seeded(6))
    examples = target.examples(torch.arange(10)) if is_minibatch else ()
    objective = Objective.of(target, base, "whitened")

    def value() -> Tensor:
        return objective.estimate((layer,), noise, *examples).sum()

    value().backward()
    for parameter in layer.parameters():
        step = 1e-5 * torch.randn(parameter.shape, generator=seeded(7), dtype=torch.float64)
        with torch.no_grad():
            parameter += step
            above = float(value())
            parameter -= 2 * step
            below = float(value())
            parameter += step
        assert parameter.grad is not None
        assert (above - below) / 2 == pytest.approx(float((parameter.grad * step).sum()), rel=1e-5)
