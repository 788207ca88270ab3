"""Latent binary layers: moments, divergences and gradients against closed forms, sampling, quadrature and autograd."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy import integrate, stats
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.commands import fit_lbbnn
from bnncli.latent import fit
from bnncli.latent.factors import (
    Coupling,
    Factors,
    Moments,
    MultiplierModel,
    initial_factors,
    initial_model,
    layer_moments,
    moments,
)
from bnncli.latent.fit import (
    EstimatorSettings,
    Inputs,
    Minibatch,
    Plan,
    Step,
    differentiate,
    draw_activations,
    draw_logits,
    fit_latent,
    weight_moments,
    workspace_of,
)
from bnncli.latent.model import (
    LatentModel,
    Multiplier,
    SpikeAndSlab,
    bias_divergence,
    factor_gradients,
    learn_prior,
    weight_divergence,
)
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.progress import SilentProgress
from bnncli.targets.blocks import FeatureBlocks
from bnncli.training.loop import LearningRateSchedule, num_batches, train

SMALL = NetworkLayout((4, 3, 2))


def factors_of(layout: NetworkLayout, num_repeats: int = 2, *, needs_grad: bool = False) -> Factors:
    found = initial_factors(layout, num_repeats, seeded(1), logit_range=(-2, 2), mean_range=1.0)
    tensors = {name: part.double() for name, part in found.tensors().items()}
    tensors["rho"] += 4
    tensors["bias_rho"] += 4
    return Factors(**{name: part.requires_grad_(needs_grad) for name, part in tensors.items()})


def prior_of(num_layers: int) -> SpikeAndSlab:
    parts = ([0.1, 0.3], [0.2, -0.1], [0.7, 1.3])
    return SpikeAndSlab(*(torch.tensor([part[:num_layers]], dtype=torch.float64) for part in parts), bias_sd=0.8)


def one_weight(mean: float, sd: float, logit: float, dtype: torch.dtype = torch.float64) -> Factors:
    rho = math.log(math.expm1(sd))
    values = [torch.full((1, 1), value, dtype=dtype) for value in (mean, rho, logit)]
    return Factors(*values, torch.zeros(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))


ONE = NetworkLayout((1, 1))


def test_divergence_is_zero_when_the_factors_are_the_prior() -> None:
    prior = SpikeAndSlab.constant(1, inclusion=0.3, slab_mean=0.5, slab_sd=0.7)
    factors = one_weight(0.5, 0.7, math.log(0.3 / 0.7))
    assert weight_divergence(factors, prior, ONE).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("mean", "sd", "logit"), [(0.3, 0.2, 1.0), (-1.0, 0.9, -2.0), (0.0, 0.05, 4.0)])
def test_divergence_is_the_integral_over_both_parts(mean: float, sd: float, logit: float) -> None:
    prior = SpikeAndSlab.constant(1, inclusion=0.2, slab_mean=0.1, slab_sd=1.5)
    alpha = 1 / (1 + math.exp(-logit))
    q, p = stats.norm(mean, sd), stats.norm(0.1, 1.5)
    slab = integrate.quad(lambda w: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), mean - 12 * sd, mean + 12 * sd)[0]
    expected = alpha * (slab + math.log(alpha / 0.2)) + (1 - alpha) * math.log((1 - alpha) / 0.8)
    found = weight_divergence(one_weight(mean, sd, logit), prior, ONE).item()
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("logit", [-200.0, -89.0, 17.0, 200.0])
def test_divergence_and_gradients_are_finite_in_float32_for_any_inclusion(logit: float) -> None:
    factors = one_weight(0.3, 0.2, logit, dtype=torch.float32)
    prior = SpikeAndSlab.constant(1)
    value = weight_divergence(factors, prior, ONE).item()
    kl = stats.norm(0.3, 0.2)
    slab = integrate.quad(lambda w: kl.pdf(w) * (kl.logpdf(w) - stats.norm.logpdf(w)), -3, 3)[0]
    expected = slab + math.log(1 / 0.05) if logit > 0 else math.log(1 / 0.95)
    assert value == pytest.approx(expected, rel=1e-5)
    nothing = torch.zeros(1, 1)
    for part in factor_gradients(factors, Moments(nothing, nothing, nothing), prior, ONE, scale=1.0):
        assert torch.isfinite(part).all()


def test_divergence_of_biases_is_that_of_gaussians() -> None:
    factors, prior = factors_of(SMALL), prior_of(2)
    normal = torch.distributions.Normal
    each = torch.distributions.kl_divergence(
        normal(factors.bias_mean, factors.bias_sd), normal(torch.zeros(()).double(), 0.8)
    )
    expected = torch.stack([part.sum(dim=1) for part in SMALL.biases(each)], dim=1)
    torch.testing.assert_close(bias_divergence(factors.bias_mean, factors.bias_rho, prior, SMALL), expected)


@pytest.mark.parametrize("variance", ["exact", "published"])
@pytest.mark.parametrize("has_multipliers", [False, True])
def test_gradients_of_the_factors_are_those_of_autograd(variance: str, has_multipliers: bool) -> None:
    factors, prior = factors_of(SMALL, needs_grad=True), prior_of(2)
    multipliers = None
    if has_multipliers:
        drawn = [torch.rand(2, 5, size, generator=seeded(size), dtype=torch.float64) for size in (4, 3)]
        multipliers = [Multiplier(z.mean(dim=1), z.square().mean(dim=1)) for z in drawn]
    weights = [torch.randn(2, SMALL.num_weights, generator=seeded(i), dtype=torch.float64) for i in range(3)]

    def loss(parts: Moments) -> Tensor:
        total = (parts.mean.sin() * weights[0]).sum() + (parts.noise.exp() * weights[1]).sum()
        return total if parts.switching is None else total + (parts.switching.square() * weights[2]).sum()

    alpha, sd = torch.sigmoid(factors.logit), softplus(factors.rho)
    by_hand = (
        Moments(alpha * factors.mean, (alpha * sd).square(), None)
        if variance == "published"
        else Moments(alpha * factors.mean, alpha * sd.square(), alpha * (1 - alpha) * factors.mean.square())
    )
    made = moments(factors, SMALL, variance=variance)
    for one, other in zip(made, by_hand, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)
    leaf = Moments(*(None if part is None else part.detach().requires_grad_() for part in by_hand))  # type: ignore[arg-type]
    given = [part for part in leaf if part is not None]
    gradient = Moments(*torch.autograd.grad(loss(leaf), given), *[None] * (3 - len(given)))  # type: ignore[arg-type]
    total = loss(by_hand) + 0.37 * weight_divergence(factors, prior, SMALL, multipliers).sum()
    expected = torch.autograd.grad(total, [factors.mean, factors.rho, factors.logit])
    found = factor_gradients(factors, gradient, prior, SMALL, scale=0.37, variance=variance, multipliers=multipliers)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def model_of(layout: NetworkLayout, *, has_multipliers: bool = False, needs_grad: bool = False) -> LatentModel:
    multipliers = []
    if has_multipliers:
        for _, inputs in layout.shapes:
            start = initial_model(inputs, 2, seeded(inputs), hidden=(5, 5))
            tensors = {name: part.double() for name, part in start.tensors()}
            tensors["start_log_var"] += 8
            tensors |= {name: part * 20 for name, part in tensors.items() if name.endswith("weight.2")}
            if needs_grad:
                tensors = {n: part if n.endswith("mask") else part.requires_grad_() for n, part in tensors.items()}
            multipliers.append(MultiplierModel.from_tensors(tensors))
    factors = factors_of(layout, needs_grad=needs_grad)
    return LatentModel(layout, factors, prior_of(layout.num_layers), tuple(multipliers))


@pytest.mark.parametrize("has_multipliers", [False, True])
def test_drawn_weights_have_the_moments_that_activations_are_drawn_with(has_multipliers: bool) -> None:
    layout = NetworkLayout((4, 3))
    model = model_of(layout, has_multipliers=has_multipliers)
    count = 40_000
    weights, biases = model.draw_weights(torch.ones(count, dtype=torch.int64), seeded(5))
    theta = layout.join(weights, biases)
    features = torch.tensor([[0.5, -1.0, 2.0, 0.1]], dtype=torch.float64)
    by_weights = layout.logits(features, theta)[:, 0]
    repeated = features.expand(count, -1)
    by_activations = draw_logits(model, repeated, weight_moments(model, "exact"), seeded(6), multiplier_draws=count)[1]
    error = by_weights.std(dim=0) / math.sqrt(count)
    assert ((by_weights.mean(dim=0) - by_activations.mean(dim=0)).abs() < 6 * error).all()
    # A variance's standard error is var sqrt((kurtosis - 1) / S); six of them for a kurtosis of 6.
    ratio = by_weights.var(dim=0) / by_activations.var(dim=0)
    assert ((ratio - 1).abs() < 6 * math.sqrt(2 * 5 / count)).all()
    if not has_multipliers:
        own = layer_moments(moments(model.factors, layout), layout)[0]
        exact = (features.square() @ (own.noise + own.switching)[1].T)[0] + model.factors.bias_sd[1].square()
        assert ((by_weights.var(dim=0) / exact - 1).abs() < 6 * math.sqrt(5 / count)).all()
        is_out = (weights == 0).double().mean(dim=0)
        assert ((is_out - (1 - model.factors.inclusion[1])).abs() < 6 * 0.5 / math.sqrt(count)).all()


def test_activations_are_mean_plus_standard_deviation_times_noise() -> None:
    rng = seeded(3)
    inputs, z = torch.randn(2, 5, 4, generator=rng), torch.rand(2, 5, 4, generator=rng)
    weight = Moments(*(torch.rand(2, 3, 4, generator=rng) for _ in range(3)))
    mean, sd, noise = (torch.rand(*shape, generator=rng) for shape in ((2, 3), (2, 3), (2, 5, 3)))
    found = draw_activations(inputs, weight, mean, sd.square(), noise, z)
    for r, n, j in itertools.product(range(2), range(5), range(3)):
        x, own = inputs[r, n], z[r, n]
        center = (x * own * weight.mean[r, j]).sum() + mean[r, j]
        variance = (x**2 * (weight.noise[r, j] + own**2 * weight.switching[r, j])).sum() + sd[r, j] ** 2
        assert found[r, n, j].item() == pytest.approx(float(center + variance.sqrt() * noise[r, n, j]), rel=1e-4)


def test_logits_are_those_of_the_network_with_these_parameters() -> None:
    layout = NetworkLayout((4, 5, 3, 2))
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    theta = torch.randn(6, layout.num_params, generator=seeded(2))
    features = torch.randn(7, 4, generator=seeded(3))
    found = layout.logits(features, theta)
    for one, logits in zip(theta, found, strict=True):
        nn.utils.vector_to_parameters(one, network.parameters())
        torch.testing.assert_close(logits, network(features), rtol=1e-5, atol=1e-5)
    weights = torch.cat([part.flatten(1) for part, _ in layout.split(theta)], dim=1)
    biases = torch.cat([part for _, part in layout.split(theta)], dim=1)
    torch.testing.assert_close(layout.join(weights, biases), theta)


def test_a_coupling_layer_is_invertible_and_knows_its_determinant() -> None:
    model = model_of(NetworkLayout((5, 2)), has_multipliers=True).multipliers[0]
    for layer in model.flow:
        z = torch.randn(2, 3, 5, generator=seeded(4), dtype=torch.float64)
        moved, log_det = layer(z)
        torch.testing.assert_close(layer.inverse(moved), z, rtol=1e-9, atol=1e-9)
        for r, m in itertools.product(range(2), range(3)):

            def alone(point: Tensor, points: Tensor = z, layer: Coupling = layer, r: int = r, m: int = m) -> Tensor:
                changed = points.clone()
                changed[r, m] = point
                return layer(changed)[0][r, m]

            jacobian = torch.autograd.functional.jacobian(alone, z[r, m])
            assert log_det[r, m].item() == pytest.approx(float(torch.linalg.slogdet(jacobian)[1]), abs=1e-10)


def test_the_layers_of_a_flow_move_every_input_in_turn() -> None:
    for size, length in ((6, 2), (5, 3), (1, 2)):
        start = initial_model(size, 2, seeded(size), length=length, hidden=(3,))
        for layers in (start.flow, start.inverse_flow):
            masks = [layer.mask for layer in layers]
            assert len(masks) == length
            assert int(masks[0].sum()) == size // 2
            assert all(torch.equal(one + other, torch.ones(size)) for one, other in itertools.pairwise(masks))
    assert abs(float(start.start_mean.mean()) - 1) < 0.5  # near the network without multipliers


def test_the_density_of_multipliers_integrates_to_one_and_is_that_of_the_draws() -> None:
    model = model_of(NetworkLayout((2, 1)), has_multipliers=True).multipliers[0]
    z, log_density = model.draw(torch.randn(2, 4, 2, generator=seeded(1), dtype=torch.float64))
    torch.testing.assert_close(model.log_density(z), log_density, rtol=1e-8, atol=1e-8)
    axis = torch.linspace(-6, 8, 281, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis).expand(2, -1, -1)
    total = model.log_density(grid).exp().sum(dim=1) * (axis[1] - axis[0]) ** 2
    torch.testing.assert_close(total, torch.ones(2, dtype=torch.float64), rtol=2e-3, atol=0)


def test_the_auxiliary_density_is_a_gaussian_pulled_through_its_flow() -> None:
    model = model_of(NetworkLayout((3, 4)), has_multipliers=True).multipliers[0]
    rng = seeded(9)
    weight = Moments(*(torch.rand(2, 4, 3, generator=rng, dtype=torch.float64) for _ in range(3)))
    z = torch.randn(2, 5, 3, generator=rng, dtype=torch.float64)
    noise = torch.randn(2, 5, 4, generator=rng, dtype=torch.float64)
    found = model.log_auxiliary(z, weight, noise)
    for r, m in itertools.product(range(2), range(5)):
        e, own = model.readout[r], z[r, m]
        mean = weight.mean[r] @ (e * own)
        variance = weight.noise[r] @ e**2 + weight.switching[r] @ (e * own) ** 2
        level = torch.tanh(mean + variance.sqrt() * noise[r, m])
        location = torch.outer(model.location[r], level).mean(dim=1)
        sd = (0.5 * torch.outer(model.log_scale[r], level).mean(dim=1)).exp()
        moved, log_det = z, torch.zeros(2, 5, dtype=torch.float64)
        for layer in model.inverse_flow:
            moved, step = layer(moved)
            log_det = log_det + step
        expected = torch.distributions.Normal(location, sd).log_prob(moved[r, m]).sum() + log_det[r, m]
        assert found[r, m].item() == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("is_in", [False, True])
def test_the_flow_part_of_the_reported_bound_is_of_weights_that_are_drawn(
    is_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, count = NetworkLayout((4, 2)), 8000
    model = model_of(layout, has_multipliers=True)
    if is_in:  # activations follow z, and the base of r follows them
        for tensor, factor in (("readout", 3), ("location", 20)):
            getattr(model.multipliers[0], tensor).mul_(factor)
        model.multipliers[0].start_log_var.add_(1)
        model.factors.mean.mul_(4)
        model.factors.logit.add_(3)
    else:  # activations follow the inclusions, far from a Gaussian
        for tensor in ("readout", "location", "log_scale"):
            getattr(model.multipliers[0], tensor).mul_(10)
    monkeypatch.setattr(fit_lbbnn, "FLOW_DRAWS", count)
    monkeypatch.setattr(fit_lbbnn, "NUM_PASSES", count // 4)
    run: Any = SimpleNamespace(console=SimpleNamespace(poll=lambda: None))
    found = fit_lbbnn._flow_divergences(run, LatentBinary(model, best=1), seeded(2))
    assert found.shape == (count, 1)

    part, factors, rng = model.multipliers[0], model.factors, seeded(3)
    z, log_q = part.draw(torch.randn(2, count, 4, generator=rng, dtype=torch.float64))
    z, shape = z[1], (count, 2, 4)
    mean, sd, alpha = (layout.weights(each)[0][1] for each in (factors.mean, factors.sd, factors.inclusion))
    weight = (torch.rand(shape, generator=rng) < alpha) * (
        z.unsqueeze(1) * mean + sd * torch.randn(shape, generator=rng)
    )
    level = torch.tanh(torch.einsum("moi,i->mo", weight, part.readout[1])).mean(dim=1, keepdim=True)
    moved, log_det = z.expand(2, -1, -1), torch.zeros(2, count, dtype=torch.float64)
    for layer in part.inverse_flow:
        moved, step = layer(moved)
        log_det = log_det + step
    base = torch.distributions.Normal(part.location[1] * level, (0.5 * part.log_scale[1] * level).exp())
    expected = log_q[1] - base.log_prob(moved[1]).sum(dim=1) - log_det[1]
    error = math.hypot(float(expected.std()), float(found.std())) / math.sqrt(count)
    assert float(found.mean()) == pytest.approx(float(expected.mean()), abs=4 * error)
    # Activations that are taken to be Gaussian give another value.
    own = layer_moments(moments(factors, layout), layout)[0]
    rough = log_q - part.log_auxiliary(z.expand(2, -1, -1), own, torch.randn(2, count, 2, generator=rng).double())
    assert is_in or abs(float(rough[1].mean() - found.mean())) > 4 * error


def test_no_networks_of_a_flow_make_it_run_away() -> None:
    tame = initial_model(6, 3, seeded(0), hidden=(8, 8))
    wild = MultiplierModel.from_tensors({n: p if "mask" in n or "start" in n else 1e4 * p for n, p in tame.tensors()})
    noise = torch.randn(3, 200, 6, generator=seeded(1))
    z = wild.start_mean.unsqueeze(1) + (0.5 * wild.start_log_var).exp().unsqueeze(1) * noise
    assert not torch.allclose(wild.draw(noise)[0], z)
    for layer in wild.flow + wild.inverse_flow:
        z = layer(z)[0]
        assert bool((z.abs() <= 10 * (1 + 1e-6)).all())
    weight = Moments(*(torch.rand(3, 4, 6, generator=seeded(2)) for _ in range(3)))
    drawn, log_density = wild.draw(noise)
    assert bool(torch.isfinite(log_density).all())
    assert bool(torch.isfinite(wild.log_auxiliary(drawn, weight, torch.randn(3, 200, 4, generator=seeded(3)))).all())


def test_flows_learn_at_their_own_rate() -> None:
    features, labels, _ = batch_of(SMALL, 8)
    multipliers = tuple(initial_model(i, 2, seeded(i), hidden=(5,)) for _, i in SMALL.shapes)
    model = LatentModel(SMALL, initial_factors(SMALL, 2, seeded(1)), prior_of(2), multipliers)
    before = {name: part.detach().clone() for name, part in model.tensors()}
    plan = Plan(epochs=1, batch_size=8, learning_rate=0.01, flow_rate=0.002, settings=EstimatorSettings("mnf"))
    after = dict(fit_latent(model, features.float(), labels, plan, generator=seeded(3))[0].tensors())
    for name, part in after.items():
        # The first step of Adam is the rate, with the gradient's sign.
        moved = float((part.detach() - before[name]).abs().max())
        expected = 0 if name.endswith("mask") else 0.002 if name.startswith("multiplier") else 0.01
        assert moved == pytest.approx(expected, rel=0.02), name


def copy_with_grad(model: LatentModel) -> LatentModel:
    def fresh(part: Tensor) -> Tensor:
        return part.detach().clone().requires_grad_()

    factors = Factors(**{name: fresh(part) for name, part in model.factors.tensors().items()})
    multipliers = tuple(
        MultiplierModel.from_tensors({n: p if n.endswith("mask") else fresh(p) for n, p in one.tensors()})
        for one in model.multipliers
    )
    return LatentModel(model.layout, factors, model.prior, multipliers)


def batch_of(layout: NetworkLayout, count: int = 7) -> Minibatch:
    features = torch.randn(count, layout.num_features, generator=seeded(11), dtype=torch.float64)
    labels = torch.randint(0, layout.num_classes, (count,), generator=seeded(12))
    return Minibatch(features, labels, 0.2)


@pytest.mark.parametrize("has_multipliers", [False, True])
@pytest.mark.parametrize("variance", ["exact", "published"])
def test_a_step_has_the_gradient_of_the_whole_bound(has_multipliers: bool, variance: str) -> None:
    model = model_of(SMALL, has_multipliers=has_multipliers, needs_grad=True)
    batch, settings = (
        batch_of(SMALL),
        EstimatorSettings("mnf" if has_multipliers else "lrt", variance, multiplier_draws=3),
    )
    differentiate(model, batch, settings, seeded(7))

    other = copy_with_grad(model)
    factors, rng = other.factors, seeded(7)
    alpha, sd = torch.sigmoid(factors.logit), softplus(factors.rho)
    noise = (alpha * sd).square() if variance == "published" else alpha * sd.square()
    switching = None if variance == "published" else alpha * (1 - alpha) * factors.mean.square()
    layers = layer_moments(Moments(alpha * factors.mean, noise, switching), SMALL)
    hidden, loss, found = batch.features.expand(2, -1, -1), torch.zeros((), dtype=torch.float64), []

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=rng).double()

    biases = zip(SMALL.biases(factors.bias_mean), SMALL.biases(factors.bias_sd.square()), strict=True)
    for index, (own, bias) in enumerate(zip(layers, biases, strict=True)):
        outputs, inputs = SMALL.shapes[index]
        z = None
        if has_multipliers:
            drawn, log_q = other.multipliers[index].draw(normal(3, inputs))
            loss = (
                loss
                + 0.2 * (log_q - other.multipliers[index].log_auxiliary(drawn, own, normal(3, outputs))).mean(1).sum()
            )
            found.append(Multiplier(drawn.mean(dim=1), drawn.square().mean(dim=1)))
            z = drawn[:, torch.arange(7) % 3]
        hidden = draw_activations(hidden.relu() if index else hidden, own, *bias, normal(7, outputs), z)
    divergence = weight_divergence(factors, other.prior, SMALL, found or None).sum()
    divergence = divergence + bias_divergence(factors.bias_mean, factors.bias_rho, other.prior, SMALL).sum()
    (loss + 0.2 * divergence - SMALL.likelihood.log_likelihoods(hidden, batch.labels).sum()).backward()
    for (name, one), (_, two) in zip(model.tensors(), other.tensors(), strict=True):
        if not name.endswith("mask"):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("estimator", ["lrt", "mnf", "concrete"])
def test_a_step_in_memory_of_the_step_before_has_the_same_gradient(estimator: str) -> None:
    model = model_of(SMALL, has_multipliers=estimator == "mnf", needs_grad=True)
    space, gradients = workspace_of(model), []
    for seed in (1, 2, 1):
        differentiate(model, batch_of(SMALL), EstimatorSettings(estimator, temperature=0.5), seeded(seed), space)
        gradients.append([t.grad.clone() for name, t in model.tensors() if t.grad is not None])
    assert all(torch.equal(first, last) for first, last in zip(gradients[0], gradients[2], strict=True))
    assert not any(torch.equal(first, other) for first, other in zip(gradients[0], gradients[1], strict=True))


def without_values(model: LatentModel) -> LatentModel:
    """A copy on a device of its own whose tensors have no values: whatever asks for one, as a wait for a GPU does, raises."""
    parts = [{n: p.to("meta") for n, p in one.tensors()} for one in model.multipliers]
    prior = copy.copy(model.prior)
    for name, part in model.prior.tensors().items():
        object.__setattr__(prior, name, part.to("meta"))
    return LatentModel(model.layout, model.factors.to("meta"), prior, tuple(map(MultiplierModel.from_tensors, parts)))


@pytest.mark.parametrize("has_multipliers", [False, True])
def test_draws_and_flows_stay_where_the_model_is(has_multipliers: bool) -> None:
    moved = without_values(model_of(SMALL, has_multipliers=has_multipliers))
    scaling = [torch.ones(4, dtype=torch.float64, device="meta") for _ in range(2)]
    posterior = LatentBinary(moved, tuple(moved.multiplier_means(seeded(0))), 1, *scaling)
    run: Any = SimpleNamespace(console=SimpleNamespace(poll=lambda: None))
    found = [posterior.sample(3, seeded(1)), posterior.center, posterior.mean_theta, posterior.pruned(0.3)]
    found.append(fit.average_divergence(moved, seeded(2), 4))
    found.append(layer_moments(weight_moments(moved, "exact"), SMALL)[0].mean)
    if has_multipliers:
        found.append(fit_lbbnn._flow_divergences(run, posterior, seeded(3)))
    assert {part.device.type for part in found} == {"meta"}


def test_a_step_with_relaxed_inclusions_has_the_gradient_of_its_bound() -> None:
    model = model_of(SMALL, needs_grad=True)
    batch = batch_of(SMALL)
    differentiate(model, batch, EstimatorSettings("concrete", temperature=0.5), seeded(7))
    other, rng = copy_with_grad(model), seeded(7)
    factors = other.factors
    uniform = torch.rand(factors.mean.shape, generator=rng).double()
    relaxed = torch.sigmoid((factors.logit - torch.logit(uniform)) / 0.5)
    weight = relaxed * (factors.mean + factors.sd * torch.randn(factors.mean.shape, generator=rng).double())
    bias = factors.bias_mean + factors.bias_sd * torch.randn(factors.bias_mean.shape, generator=rng).double()
    logits = SMALL.logits(batch.features, SMALL.join(weight, bias))
    divergence = weight_divergence(factors, other.prior, SMALL).sum()
    divergence = divergence + bias_divergence(factors.bias_mean, factors.bias_rho, other.prior, SMALL).sum()
    (0.2 * divergence - SMALL.likelihood.log_likelihoods(logits, batch.labels).sum()).backward()
    for name, one in model.factors.tensors().items():
        torch.testing.assert_close(one.grad, getattr(factors, name).grad, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_the_learnt_prior_maximises_the_bound_and_its_hyper_prior(weight: float) -> None:
    model, expected = model_of(SMALL), prior_of(2)
    best = learn_prior(model, expected, weight)
    seen = np.array([12, 6]) * weight
    inclusions, sds = expected.inclusion.numpy(), expected.slab_sd.numpy()
    p, q, a, b = 1 + inclusions * seen, 1 + (1 - inclusions) * seen, 1 + seen / 2, 1 + sds**2 * seen / 2

    def value(inclusion: Tensor, sd: Tensor) -> Tensor:
        prior = SpikeAndSlab(inclusion, best.slab_mean, sd)
        hyper = torch.from_numpy(stats.beta.logpdf(inclusion.numpy(), p, q))
        hyper = hyper + torch.from_numpy(stats.invgamma.logpdf(sd.numpy() ** 2, a, scale=b))
        return hyper - weight_divergence(model.factors, prior, model.layout)

    top = value(best.inclusion, best.slab_sd)
    for factor in (0.97, 1.03):
        assert (value(best.inclusion * factor, best.slab_sd) < top).all()
        assert (value(best.inclusion, best.slab_sd * factor) < top).all()


def test_the_bound_lies_below_the_log_evidence_and_close_to_it_where_the_factors_can_be_right() -> None:
    # Two weights, a single logit; the bias is pinned to zero by prior and factor alike.
    rng = np.random.default_rng(0)
    features = rng.normal(size=(12, 2))
    labels = (features[:, 0] + 0.3 * rng.normal(size=12) > 0).astype(int)
    layout, inclusion, slab_sd = NetworkLayout((2, 1)), 0.3, 1.5
    signs = 2 * labels - 1

    def likelihood(*weights: float) -> float:
        return float(np.exp(-np.logaddexp(0, -signs * (features @ np.array(weights))).sum()))

    pdf = stats.norm(0, slab_sd).pdf
    axis = np.linspace(-12, 12, 241)  # equal steps are exact to many digits for what vanishes at both ends
    margins = -signs * (axis[:, None, None] * features[:, 0] + axis[None, :, None] * features[:, 1])  # (241, 241, 12)
    both = np.exp(-np.logaddexp(0, margins).sum(axis=2)) * pdf(axis)[:, None] * pdf(axis)
    models = [
        (1 - inclusion) ** 2 * likelihood(0, 0),
        inclusion * (1 - inclusion) * integrate.quad(lambda w: pdf(w) * likelihood(w, 0), -15, 15)[0],
        inclusion * (1 - inclusion) * integrate.quad(lambda w: pdf(w) * likelihood(0, w), -15, 15)[0],
        inclusion**2 * both.sum() * (axis[1] - axis[0]) ** 2,
    ]
    evidence = math.log(sum(models))
    prior = SpikeAndSlab.constant(1, inclusion=inclusion, slab_sd=slab_sd, bias_sd=1e-4)
    start = initial_factors(layout, 1, seeded(0))
    start.bias_rho.fill_(math.log(math.expm1(1e-4)))
    start.bias_mean.zero_()
    model = LatentModel(layout, start, prior)
    data = torch.from_numpy(features).float(), torch.from_numpy(labels)
    plan = Plan(epochs=300, batch_size=12, learning_rate=0.06, schedule="cosine")
    fitted, _ = fit_latent(model, *data, plan, generator=seeded(1))
    weights, biases = fitted.draw_weights(torch.zeros(20_000, dtype=torch.int64), seeded(2))
    logits = layout.logits(data[0], layout.join(weights, biases))
    drawn = layout.likelihood.log_likelihoods(logits, data[1]).sum(dim=1).double()
    divergence = (
        weight_divergence(fitted.factors, prior, layout).sum()
        + bias_divergence(fitted.factors.bias_mean, fitted.factors.bias_rho, prior, layout).sum()
    )
    bound = float(drawn.mean() - divergence.detach())
    error = float(drawn.std()) / math.sqrt(len(drawn))
    assert bound < evidence + 5 * error
    assert bound > evidence - 1.0
    assert fitted.factors.inclusion[0, 0] > 0.9 > 0.5 > fitted.factors.inclusion[0, 1]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_learning_rates_follow_the_plan(schedule: str) -> None:
    features, labels, _ = batch_of(SMALL, 30)
    plan = Plan(3, 8, 0.01, schedule=schedule, inclusion_rate=0.1, flow_rate=0.002, early_epochs=2)
    multipliers = tuple(initial_model(i, 1, seeded(i), hidden=(5,)) for _, i in SMALL.shapes)
    model = LatentModel(SMALL, initial_factors(SMALL, 1, seeded(1)), prior_of(2), multipliers)
    inputs = Inputs(FeatureBlocks(features.float(), features.device))
    learner = fit.LatentLearner(model, inputs, labels, plan, seeded(2))
    rates: list[list[float]] = []

    class Watched(SilentProgress):
        def task(self, name: str, total: int) -> Any:
            return self

        def advance(self, amount: int = 1, note: str = "") -> None:
            rates.extend([[float(group["lr"]) for group in learner.optimizer.param_groups]] * amount)

    train(learner, LearningRateSchedule(3, num_batches(learner), schedule), what="fit", progress=Watched())
    assert len(rates) == 12
    one = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=12)
    for step in range(12):  # of three epochs of four batches
        factor = course.get_last_lr()[0] if schedule == "cosine" else 1.0
        expected = [(0.1 if step < 8 else 0.01) * factor, 0.01 * factor, 0.002 * factor]
        assert rates[step] == pytest.approx(expected)
        one.step()
        course.step()


def test_a_learnt_prior_is_frozen_after_the_early_epochs() -> None:
    features, labels, _ = batch_of(SMALL, 30)
    model = LatentModel(SMALL, initial_factors(SMALL, 2, seeded(1)), prior_of(2))
    states: list[dict[str, Tensor]] = []
    plan = Plan(4, 8, 0.01, early_epochs=2, hyper_prior=True, prior_weight=2.0, settings=EstimatorSettings("concrete"))
    fit_latent(
        model, features.float(), labels, plan,
        generator=seeded(3), save=lambda state, is_last: states.append(dict(state)),
    )  # fmt: skip
    for name in ("inclusion", "slab_sd"):
        first, second, *frozen = (state[f"prior.{name}"] for state in states)
        assert not torch.equal(first, second)
        assert all(torch.equal(second, later) for later in frozen)
        names = ("logit", "mean", "rho", "bias_mean", "bias_rho")
        then = Factors(**{part: states[1][f"parameter.{i}"] for i, part in enumerate(names)})
        # The hyper-prior stays that of the start.
        expected = learn_prior(replace(model, factors=then), prior_of(2), 2.0).tensors()[name]
        torch.testing.assert_close(second, expected)


def test_the_divergence_with_multipliers_is_its_mean_over_them() -> None:
    model, count = model_of(SMALL, has_multipliers=True), 9
    found = fit.average_divergence(model, seeded(4), count)
    rng, total = seeded(4), torch.zeros(2, 2, dtype=torch.float64)
    draws = [part.draw(torch.randn(2, count, part.start_mean.shape[1], generator=rng))[0] for part in model.multipliers]
    for index in range(count):
        mean = model.factors.mean.clone()
        for view, z in zip(SMALL.weights(mean), draws, strict=True):
            view *= z[:, index].unsqueeze(1)
        total += weight_divergence(replace(model.factors, mean=mean), model.prior, SMALL) / count
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shuffles", [True, False])
def test_batches_of_an_epoch_are_all_examples_once_each_with_its_share(
    shuffles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, batches = NetworkLayout((1, 2)), []
    fits: list[float] = []

    def watched(model: LatentModel, batch: Minibatch, *rest: Any) -> Step:
        batches.append(batch)
        step = differentiate(model, batch, *rest)
        fits.append(float(step.log_likelihood))
        return step._replace(flow=torch.full((1, 1), float(len(batch.features))))

    monkeypatch.setattr(fit, "differentiate", watched)
    model = LatentModel(layout, initial_factors(layout, 1, seeded(1)), prior_of(1))
    plan = Plan(epochs=2, batch_size=8, learning_rate=0.01, shuffles=shuffles)
    labels = torch.arange(30) % 2
    _, history = fit_latent(model, torch.arange(30.0).unsqueeze(1), labels, plan, generator=seeded(2))
    parts = {name: torch.stack(values) for name, values in history.parts.items()}
    assert parts["log_likelihood"].tolist() == [[pytest.approx(sum(fits[:4]))], [pytest.approx(sum(fits[4:]))]]
    assert parts["flow_divergence"].tolist() == 2 * [[[pytest.approx((3 * 8**2 + 6**2) / 30)]]]  # weighted by share
    divergence = sum(parts[f"{name}_divergence"].sum(dim=2) for name in ("weight", "bias", "flow"))
    torch.testing.assert_close(history.bound(), parts["log_likelihood"] - divergence)
    epochs = batches[:4], batches[4:]
    for epoch in epochs:
        assert [batch.share for batch in epoch] == [8 / 30, 8 / 30, 8 / 30, 6 / 30]
        seen = torch.cat([batch.features[:, 0] for batch in epoch]).long()
        assert torch.equal(seen.sort().values, torch.arange(30))
        assert torch.equal(torch.cat([batch.labels for batch in epoch]), labels[seen])
        assert torch.equal(seen, torch.arange(30)) != shuffles
    assert torch.equal(epochs[0][0].features, epochs[1][0].features) != shuffles


def test_batches_make_up_the_bound_whatever_their_size() -> None:
    features, labels, _ = batch_of(SMALL, 30)
    model = LatentModel(SMALL, initial_factors(SMALL, 1, seeded(1)), prior_of(2))
    bounds = []
    for size in (30, 7):  # 20 repeats of one network are as good as 20 times the epochs
        parts = {name: part.repeat(20, 1) for name, part in model.factors.tensors().items()}
        plan = Plan(epochs=10, batch_size=size, learning_rate=1e-9)
        start = replace(model, factors=Factors(**parts))
        _, history = fit_latent(start, features.float(), labels, plan, generator=seeded(2))
        bounds.append(history.bound().flatten())
    means, errors = [b.mean() for b in bounds], [b.std() / math.sqrt(len(b)) for b in bounds]
    assert abs(float(means[0] - means[1])) < 5 * float(errors[0] + errors[1])


def test_the_posterior_keeps_everything_and_its_networks_are_what_they_say() -> None:
    model = model_of(SMALL, has_multipliers=True)
    posterior = LatentBinary(model, tuple(model.multiplier_means(seeded(0))), best=1)
    again = LatentBinary.from_tensors(*posterior.to_tensors())
    assert torch.equal(again.sample(3, seeded(4)), posterior.sample(3, seeded(4)))
    assert torch.equal(again.center, posterior.center)
    factors = model.factors
    mean, z = SMALL.weights(factors.mean)[0][1], posterior.multiplier_means[0][1]
    alpha = SMALL.weights(factors.inclusion)[0][1]
    first = SMALL.split(posterior.mean_theta)[0][0]
    torch.testing.assert_close(first, alpha * mean * z)
    torch.testing.assert_close(SMALL.split(posterior.center)[0][0], mean * z * (alpha > 0.5))
    torch.testing.assert_close(SMALL.split(posterior.pruned(0.8))[1][1], SMALL.biases(factors.bias_mean)[1][1])
    drawn = posterior.sample(20_000, seeded(8))[1::2]
    error = drawn.std(dim=0) / math.sqrt(len(drawn))
    assert ((drawn.mean(dim=0) - posterior.mean_theta).abs() < 6 * error + 1e-3).all()
