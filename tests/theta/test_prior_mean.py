"""A prior about a mean: the mode by scipy in two formulations, quadrature for evidence and draws, files as they were written."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.heads import ONE, THREE, by_noisy_sign, draw_theta, gaussian_at_mode, head_target
from problems.oracles import negative_log_likelihood
from problems.seeds import seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from bnncli import registry
from bnncli.inference.elbo import diagnose_importance
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fixed_log_prior
from bnncli.inference.mode import find_mode
from bnncli.inference.prior_search import search
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import CoarseGradient

every_layout = pytest.mark.parametrize("layout", [THREE, ONE], ids=str)


def about(layout: HeadLayout) -> Prior:
    """Weights of precision 2 and biases of 0.05 about a mean that is far from zero."""
    return Prior(2.0, 0.05).with_mean(3 * draw_theta(layout, seed=5), 0.5)


def make_target(layout: HeadLayout) -> LastLayerTarget:
    return head_target(layout, 40, labels=by_noisy_sign, prior=about(layout))


def log_joint_written_out(target: LastLayerTarget, theta: Tensor) -> Tensor:
    prior, layout = target.prior, target.layout
    num_biases = layout.num_outputs
    scale = torch.tensor([2.0] * (layout.num_params - num_biases) + [0.05] * num_biases, dtype=torch.float64).rsqrt()
    return torch.distributions.Normal(prior.mean, scale).log_prob(theta).sum() - negative_log_likelihood(target, theta)


def loss_of_offset(target: LastLayerTarget, delta: Tensor) -> Tensor:
    """The same as a function of theta less the mean: the mean's logits are an offset, the penalty is about zero."""
    assert target.prior.mean is not None
    weight, bias = target.layout.split(delta)
    logits = linear(target.features, *target.layout.split(target.prior.mean)) + linear(target.features, weight, bias)
    if target.layout.num_outputs == 1:
        loss = binary_cross_entropy_with_logits(logits[:, 0], target.labels.double(), reduction="sum")
    else:
        loss = cross_entropy(logits, target.labels, reduction="sum")
    return loss + weight.square().sum() + 0.025 * bias.square().sum()


def minimum(loss: partial[Tensor], size: int) -> Tensor:
    def value_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        one = torch.tensor(values, requires_grad=True)
        value = loss(one)
        return value.item(), torch.autograd.grad(value, one)[0].numpy()

    options = {"ftol": 0, "gtol": 1e-9}
    return torch.from_numpy(
        scipy.optimize.minimize(value_and_gradient, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x
    )


@every_layout
def test_value_gradient_and_hessian_are_those_written_out(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5, seed=2)
    values, gradients = target.log_joint_and_grad(theta)
    batch = target.minibatch(*target.examples(torch.arange(40))).log_joint_and_grad(theta)
    for one, value, gradient in zip(theta, values, gradients, strict=True):
        expected = log_joint_written_out(target, one.requires_grad_())
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, one)[0])
    torch.testing.assert_close(batch, (values, gradients))
    hessian = -torch.autograd.functional.hessian(partial(log_joint_written_out, target), theta[0].detach())
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    torch.testing.assert_close(target.hessian_vector_product(theta[0].detach(), eye), hessian)


@every_layout
def test_the_mode_is_the_one_scipy_finds_under_the_shifted_penalty_and_with_the_mean_as_an_offset(
    layout: HeadLayout,
) -> None:
    target = make_target(layout)
    found = find_mode(target, torch.zeros(layout.num_params), tolerance=1e-8).theta
    shifted = minimum(partial(lambda theta: -log_joint_written_out(target, theta)), layout.num_params)
    offset = minimum(partial(loss_of_offset, target), layout.num_params)
    torch.testing.assert_close(found, shifted, rtol=0, atol=1e-6)
    assert target.prior.mean is not None
    torch.testing.assert_close(found, target.prior.mean + offset, rtol=0, atol=1e-6)


def grid(target: LastLayerTarget) -> tuple[Tensor, Tensor]:
    """Points (G, 2) about the mode and the log of density times cell of each, by what is written out here."""
    axis = torch.linspace(-9, 9, 181, dtype=torch.float64)
    base = gaussian_at_mode(target)
    theta = base.mean + base.covariance.unwhiten(torch.cartesian_prod(axis, axis))
    logits = theta @ target.features.T
    likelihood = -binary_cross_entropy_with_logits(logits, target.labels.double().expand_as(logits), reduction="none")
    assert target.prior.mean is not None
    prior = torch.distributions.Normal(target.prior.mean, target.prior.weight_precision**-0.5).log_prob(theta)
    cell = 2 * math.log(float(axis[1] - axis[0])) + base.covariance.log_det_scale()
    return theta, likelihood.sum(dim=1) + prior.sum(dim=1) + cell


def small_target() -> LastLayerTarget:
    layout = HeadLayout(1, 2, has_bias=False)
    prior = Prior(0.5).with_mean(torch.tensor([3.0, -2.0]), 1.0)
    return head_target(layout, 8, labels=by_noisy_sign, prior=prior)


def test_the_evidence_is_that_of_quadrature() -> None:
    target = small_target()
    expected = float(grid(target)[1].logsumexp(dim=0))
    found = diagnose_importance(target, gaussian_at_mode(target), generator=seeded(1))
    assert found.log_evidence is not None
    assert found.log_evidence_error is not None
    assert abs(found.log_evidence - expected) < 4 * found.log_evidence_error
    assert found.log_evidence_error < 0.05


@pytest.mark.parametrize("coarse", [None, "bfloat16"])
def test_draws_of_hmc_have_the_moments_of_quadrature(coarse: str | None) -> None:
    target = small_target()
    theta, log_weights = grid(target)
    weights = log_weights.softmax(dim=0)
    mean = weights @ theta
    square = weights @ theta.square()
    base = gaussian_at_mode(target)
    draws = sample_hmc(
        target, mode=base.mean, covariance=base.covariance, num_chains=320, num_warmup=30, num_draws=40,
        generator=seeded(3), coarse=None if coarse is None else CoarseGradient.about(target, base.mean, coarse),
    ).draws.double()  # fmt: skip
    for values, expected in ((draws, mean), (draws.square(), square)):
        chains = values.mean(dim=1)
        assert ((chains.mean(dim=0) - expected).abs() < 4 * chains.std(dim=0) / math.sqrt(320)).all()


@every_layout
def test_the_coarse_gradient_is_that_of_the_target_but_for_rounding(layout: HeadLayout) -> None:
    target, anchor = make_target(layout), draw_theta(layout, seed=7)
    displacement = 0.1 * draw_theta(layout, 3, seed=8)
    found = CoarseGradient.about(target, anchor, "tf32")(displacement)
    torch.testing.assert_close(found, target.log_joint_and_grad(anchor + displacement)[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("criterion", ["val", "marglik"])
def test_a_search_keeps_the_mean_and_its_strongest_prior_is_the_mean_itself(criterion: str) -> None:
    target = make_target(THREE)
    start = draw_theta(THREE, seed=9)
    found = search(
        target, start=start, generator=seeded(), criterion=criterion,
        held_out=target.held_out(target.features[:20], target.labels[:20]), bounds=(1e12, 1e12),
    )  # fmt: skip
    gaussian, mean = found.fit.gaussian, target.prior.mean
    assert mean is not None
    assert gaussian.require_prior() == target.prior.with_weight_precision(found.best)
    weights = slice(0, THREE.num_outputs * THREE.num_features)
    torch.testing.assert_close(gaussian.mean[weights], mean[weights], rtol=0, atol=1e-9)


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_stored_gaussian_keeps_the_mean_of_its_prior(structure: str) -> None:
    gaussian = gaussian_at_mode(make_target(THREE), structure)
    tensors, meta = gaussian.to_tensors()
    prior = Gaussian.from_tensors(tensors, json.loads(json.dumps(meta))).prior
    assert prior == about(THREE)
    assert Prior.from_meta(json.loads(json.dumps(about(THREE).to_meta())), mean=tensors["prior.mean"]) == prior


def test_priors_about_other_means_are_other_priors() -> None:
    prior = about(THREE)
    assert prior.mean is not None
    moved = prior.with_mean(prior.mean + 1e-6, 0.5)
    assert prior == about(THREE)
    assert prior.is_close(prior.with_mean(prior.mean * (1 + 1e-12), 0.5))
    for other in (moved, Prior(2.0, 0.05)):
        assert prior != other
        assert not prior.is_close(other)
        assert not other.is_close(prior)
    assert str(prior) == "2 (bias 0.05) about 0.5 times the checkpoint's last layer"


def test_a_header_that_speaks_of_a_mean_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="give mean and mean_scale together"):
        Prior.from_meta(about(THREE).to_meta())


def test_the_density_of_fixed_parameters_is_about_their_mean() -> None:
    target, theta = make_target(THREE), draw_theta(THREE)
    varying = torch.tensor([0, 3, 14])
    fixed = [place for place in range(THREE.num_params) if place not in varying]
    covariance = SimpleNamespace(varying=varying, num_varying=3)
    assert target.prior.mean is not None
    scale = target.prior.diagonal(THREE).rsqrt()
    expected = torch.distributions.Normal(target.prior.mean, scale).log_prob(theta)[fixed].sum()
    assert fixed_log_prior(target, theta, covariance) == pytest.approx(float(expected))  # type: ignore[arg-type]
