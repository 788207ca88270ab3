"""Refinement: the ELBO it starts from, what it gains, what bounds it, of heads and networks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from problems.heads import by_sign, gaussian_at_mode, head_target
from problems.long_run import long_but
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import NumericError
from bnncli.flows import SPACES, build_layers
from bnncli.inference.elbo import elbo, measure_gain
from bnncli.inference.refine import Objective, RefineFit, fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.structures.full import Full
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

every_flow_and_space = pytest.mark.parametrize(
    ("kind", "space"),
    [(kind, space) for kind in registry.names("flows") for space in registry.load_class("flows", kind).spaces],
)
every_space = pytest.mark.parametrize("space", SPACES)
LAYOUTS = [HeadLayout(3, 2), HeadLayout(1, 1)]
make_target = partial(head_target, num_examples=24, labels=by_sign, prior=0.3)


@every_flow_and_space
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_estimates_are_the_log_weights_of_the_flow(kind: str, space: str, layout: HeadLayout) -> None:
    target = make_target(layout)
    base = gaussian_at_mode(target)
    layers = build_layers(kind, layout, seeded(), length=3)
    for layer in layers:
        for parameter in layer.requires_grad_(False).parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
    noise = base.noise(7, seeded())
    objective = Objective.of(target, base, space)
    estimates = objective.estimate(layers, noise, *target.examples(torch.arange(target.num_examples)))
    theta, log_density = Flow(base, layers, kind, space).from_noise(noise)
    base_log_density = base.from_noise(noise)[1]
    expected = target.log_joint(theta) - (log_density - base_log_density)
    torch.testing.assert_close(objective.estimate(layers, noise), expected)
    torch.testing.assert_close(estimates, expected)


@every_space
def test_refine_starts_at_the_laplace_elbo(space: str) -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    fit = fit_flow(
        target, base, generator=seeded(), length=1, epochs=1, batch_size=24, learning_rate=1e-12, num_draws=4000,
        space=space,
    )  # fmt: skip
    untrained = elbo(target, fit.posterior, generator=seeded(1), num_samples=4000)
    assert abs(float(fit.history[0]) - untrained.value) < 6 * untrained.standard_error


@pytest.mark.parametrize("kind", long_but(registry.names("flows"), "affine", "iaf", "radial"))
def test_refining_a_diagonal_base_gains(kind: str) -> None:
    target = make_target(LAYOUTS[1])
    base = gaussian_at_mode(target, "diag")
    fit = fit_flow(
        target, base, generator=seeded(), flow=kind, length=4, epochs=150 if kind in ("householder", "radial") else 70,
        batch_size=24, learning_rate=0.02 if kind == "spline" else 0.04, num_draws=16,
    )  # fmt: skip
    found = measure_gain(target, base, fit.posterior, generator=seeded(1), num_samples=4000)
    gain, error = found.value, found.standard_error
    assert gain > 4 * error
    assert gain > 0.02


def test_refined_elbo_stays_below_the_evidence() -> None:
    target = make_target(LAYOUTS[1])
    base = gaussian_at_mode(target)
    fit = fit_flow(target, base, generator=seeded(), epochs=120, batch_size=24, learning_rate=0.03, num_draws=16)
    axis = torch.linspace(-12, 12, 401, dtype=torch.float64)
    theta = base.mean + base.covariance.unwhiten(torch.cartesian_prod(axis, axis))
    cell = 2 * math.log(24 / 400) + base.covariance.log_det_scale()
    log_evidence = float(target.log_joint(theta).logsumexp(dim=0)) + cell
    before, after = (elbo(target, q, generator=seeded(1), num_samples=4000) for q in (base, fit.posterior))
    assert before.value - 4 * before.standard_error < after.value
    assert after.value < log_evidence + 4 * after.standard_error
    assert float(fit.history[-20:].mean()) == pytest.approx(after.value, abs=0.2)


def test_a_base_that_is_the_posterior_stays_as_it_is() -> None:
    target = make_target(LAYOUTS[0], likelihood_scale=0.0)
    base = gaussian_at_mode(target)
    fit = fit_flow(
        target, base, generator=seeded(), length=2, epochs=200, batch_size=24, learning_rate=0.02, num_draws=16
    )
    value = elbo(target, fit.posterior, generator=seeded(), num_samples=500).value
    assert value == pytest.approx(0, abs=0.01)
    assert all(abs(layer.summary()["beta"]) < 0.05 for layer in fit.posterior.layers)


def test_radial_layers_find_next_to_nothing_to_do_at_the_mode_of_much_data() -> None:
    features = torch.randn(3000, 2, generator=seeded(), dtype=torch.float64)
    labels = (
        (features @ torch.randn(2, 3, generator=seeded(1)).double()).softmax(dim=1).multinomial(1, generator=seeded())
    )
    target = LastLayerTarget(features, labels[:, 0], LAYOUTS[0], Prior(0.3))
    base = gaussian_at_mode(target)
    fit = fit_flow(
        target, base, generator=seeded(), length=2, epochs=150, batch_size=3000, learning_rate=0.04, num_draws=8
    )
    assert all(abs(layer.summary()["beta"]) < 0.05 for layer in fit.posterior.layers)
    found = measure_gain(target, base, fit.posterior, generator=seeded(1), num_samples=2000)
    gain, error = found.value, found.standard_error
    assert abs(gain) + 4 * error < 0.1


def test_minibatches_with_an_uneven_last_one_train_too() -> None:
    target = make_target(LAYOUTS[1], num_examples=25)
    base = gaussian_at_mode(target, "diag")
    fit = fit_flow(target, base, generator=seeded(), epochs=75, batch_size=8, learning_rate=0.03, num_draws=8)
    found = measure_gain(target, base, fit.posterior, generator=seeded(1), num_samples=2000)
    gain, error = found.value, found.standard_error
    assert fit.history.shape == (75,)
    assert gain > 4 * error


def test_a_learning_rate_that_diverges_is_named() -> None:
    target = make_target(LAYOUTS[0])
    with pytest.raises(NumericError, match="ELBO is not finite in epoch") as caught:
        fit_flow(
            target, gaussian_at_mode(target), generator=seeded(), epochs=3, batch_size=8, flow="affine",
            learning_rate=1e30,
        )  # fmt: skip
    assert caught.value.hint is not None
    assert "\0learning_rate\0 below 1e+30" in caught.value.hint


def test_training_ends_early_when_the_elbo_stands_still() -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)

    def fit(patience: int) -> RefineFit:
        return fit_flow(target, base, generator=seeded(), flow="affine", epochs=300, num_draws=4, patience=patience)

    early, whole = fit(3), fit(0)
    assert early.is_early
    assert len(early.history) < 240
    assert not whole.is_early
    assert len(whole.history) == 300
    ends = [elbo(target, each.posterior, generator=seeded(1), num_samples=2000) for each in (early, whole)]
    assert abs(ends[0].value - ends[1].value) < 0.1


def test_a_patience_of_one_epoch_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.inference.refine.MIN_ROUND_STEPS", 1)
    target = make_target(LAYOUTS[0])
    assert fit_flow(target, gaussian_at_mode(target), generator=seeded(), epochs=40, batch_size=4, patience=1).is_early


def test_a_rising_elbo_does_not_end_the_training() -> None:
    target = make_target(LAYOUTS[0])
    far = replace(gaussian_at_mode(target, "diag"), mean=gaussian_at_mode(target).mean + 30)
    fit = fit_flow(target, far, generator=seeded(), flow="affine", epochs=200, learning_rate=0.01, patience=3)
    assert not fit.is_early


@pytest.mark.parametrize("settings", [{"scale": "kron"}, {"scale": "block"}, {"scale": "low-rank", "rank": 2}])
def test_path_gradients_have_the_plain_ones_as_expectation_and_vanish_at_the_posterior(settings: dict) -> None:
    layout = LAYOUTS[0]
    target = make_target(layout, likelihood_scale=0.0)
    base = gaussian_at_mode(target, "diag")
    layers = build_layers("affine", layout, seeded(), length=2, **settings)
    objective = Objective.of(target, base, "whitened")
    noise = base.noise(20_000, seeded())
    at_posterior = torch.autograd.grad(objective.estimate(layers, noise[:5]).sum(), layers[0].shift)[0]
    torch.testing.assert_close(at_posterior, torch.zeros_like(at_posterior))
    for i, parameter in enumerate(parameter for layer in layers for parameter in layer.parameters()):
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=seeded(i), dtype=torch.float64))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    path = torch.autograd.grad(objective.estimate(layers, noise).mean(), parameters)
    image, log_det = noise, torch.zeros(len(noise), dtype=torch.float64)
    for layer in layers:
        image, step = layer(image)
        log_det = log_det + step
    theta = base.mean + base.covariance.unwhiten(image)
    plain = torch.autograd.grad((target.log_joint(theta) + log_det).mean(), parameters)
    for one, other in zip(path, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.03 * (1 + float(other.abs().max())))


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
        assert (above - below) / 2 == pytest.approx(float((parameter.grad * step).sum()), rel=1e-5)
