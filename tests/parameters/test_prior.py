"""Priors: densities, curvature and draws, about zero and about a mean."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.heads import ONE, THREE, by_noisy_sign, draw_theta, gaussian_at_mode, head_target
from problems.oracles import in_theta_order, negative_log_likelihood
from problems.seeds import seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from bnncli import registry
from bnncli.errors import DataError
from bnncli.flows import build_layers
from bnncli.inference import mode
from bnncli.inference.elbo import diagnose_importance
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian, fixed_log_prior
from bnncli.inference.mode import find_mode
from bnncli.inference.prior_search import search
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn
from bnncli.structures.kron import Kron
from bnncli.structures.logits import head_spread
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import CoarseGradient

LAYOUTS = [HeadLayout(3, 4), HeadLayout(1, 4)]
PRIOR = Prior(2.0, 0.05)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
EXACT = sorted(set(registry.names("curvature")) - {"kron"})  # parts of the Hessian itself
every_exact_structure = pytest.mark.parametrize("structure", EXACT)


def above(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    return (features[:, 0] + torch.randn(len(features), generator=seeded(1)) > 0.8).long()


make_target = partial(head_target, num_examples=40, labels=above, prior=PRIOR)


def precisions_of(layout: HeadLayout) -> Tensor:
    """(P,): the weights' 2, then the biases' 0.05."""
    num_weights = layout.num_outputs * layout.num_features
    return torch.tensor([2.0] * num_weights + [0.05] * layout.num_outputs, dtype=torch.float64)


def log_joint_written_out(target: LastLayerTarget, theta: Tensor) -> Tensor:
    scale = precisions_of(target.layout).rsqrt()
    return torch.distributions.Normal(torch.zeros_like(scale), scale).log_prob(theta).sum() - negative_log_likelihood(
        target, theta
    )


@every_layout
def test_the_log_joint_and_its_gradient_are_those_written_out(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5, seed=2)
    values, gradients = target.log_joint_and_grad(theta)
    for one, value, gradient in zip(theta, values, gradients, strict=True):
        expected = log_joint_written_out(target, one.requires_grad_())
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, one)[0])


@every_layout
def test_log_density_is_that_of_independent_normals(layout: HeadLayout) -> None:
    theta, scale = draw_theta(layout, 5, seed=2), precisions_of(layout).rsqrt()
    expected = torch.distributions.Normal(torch.zeros_like(scale), scale).log_prob(theta).sum(dim=1)
    torch.testing.assert_close(PRIOR.log_density(theta, layout), expected)
    torch.testing.assert_close(PRIOR.diagonal(layout), precisions_of(layout))
    same = Prior(2.0, 2.0)
    assert same.is_isotropic
    assert torch.equal(same.log_density(theta, layout), Prior(2.0).log_density(theta, layout))


def test_the_prior_of_a_network_finds_the_biases_of_every_layer() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).double()
    precisions = {"weight": 2.0, "bias": 0.05}
    scales = [(name, part, precisions[name.split(".")[1]] ** -0.5) for name, part in network.named_parameters()]
    expected = sum(torch.distributions.Normal(0.0, scale).log_prob(part).sum() for _, part, scale in scales)
    layout, theta = NetworkLayout((4, 3, 2)), torch.nn.utils.parameters_to_vector(network.parameters()).unsqueeze(0)
    torch.testing.assert_close(PRIOR.log_density(theta, layout)[0], expected)
    gradient = torch.autograd.grad(expected, list(network.parameters()))
    torch.testing.assert_close(PRIOR.gradient(theta, layout)[0], torch.nn.utils.parameters_to_vector(gradient))
    assert [part.name for part in layout.parts if part.is_bias] == ["layers.0.bias", "layers.1.bias"]


@every_layout
def test_hessian_products_are_those_of_the_log_joint(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5, seed=2)[0]
    hessian = -torch.autograd.functional.hessian(lambda one: log_joint_written_out(target, one), theta)
    products = target.hessian_vector_product(theta, torch.eye(layout.num_params, dtype=torch.float64))
    torch.testing.assert_close(products, hessian)


@every_layout
@every_exact_structure
def test_every_exact_structure_has_the_curvature_of_the_log_joint(structure: str, layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5, seed=2)[0]
    hessian = -torch.autograd.functional.hessian(lambda one: log_joint_written_out(target, one), theta)
    outputs = layout.flatten(torch.arange(layout.num_outputs).unsqueeze(1).repeat(1, layout.num_features + 1))
    kept = {
        "full": torch.ones_like(hessian),
        "block": (outputs.unsqueeze(1) == outputs).double(),
        "diag": torch.eye(layout.num_params, dtype=torch.float64),
    }[structure]
    kind = registry.load_class("covariances", structure)
    covariance = kind.from_hessian(ggn(target, theta, structure), PRIOR, layout)
    root = covariance.unwhiten(torch.eye(layout.num_params, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.inv(root.T @ root), hessian * kept)


@every_layout
def test_kron_has_the_factors_curvature_plus_both_precisions(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5, seed=2)[0]
    parts = ggn(target, theta, "kron")
    covariance = Kron.from_hessian(parts, PRIOR, layout)
    dense = in_theta_order(torch.kron(parts["hessian.kron.B"], parts["hessian.kron.A"]), layout)
    sigma = torch.linalg.inv(dense + precisions_of(layout).diag())
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    root = covariance.unwhiten(eye).T
    torch.testing.assert_close(root @ root.T, sigma)
    torch.testing.assert_close(covariance.pull_back(eye), root)
    torch.testing.assert_close(covariance.whiten(root.T), eye)
    assert covariance.log_det_scale() == pytest.approx(float(sigma.logdet()) / 2)
    jacobian = torch.zeros(7, layout.num_outputs, layout.num_params, dtype=torch.float64)
    for k in range(layout.num_outputs):
        jacobian[:, k, layout.augment(torch.arange(layout.num_params))[k]] = layout.augment_features(
            target.features[:7]
        )
    expected = jacobian @ sigma @ jacobian.mT
    torch.testing.assert_close(head_spread(covariance, layout).covariance(target.features[:7]), expected)
    diagonal = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(head_spread(covariance, layout).variance(target.features[:7]), diagonal)
    again = Kron.from_tensors(covariance.to_tensors(), layout)
    torch.testing.assert_close(again.unwhiten(eye).T, root)


@pytest.mark.parametrize("prior", [Prior(7.0), Prior(7.0, 0.05), Prior(14.0, 0.35), PRIOR], ids=str)
def test_kron_keeps_eigenvectors_under_another_prior_only_where_they_are_the_same(prior: Prior) -> None:
    target = make_target(LAYOUTS[0])
    one, other = (ggn(target, theta, "kron") for theta in draw_theta(LAYOUTS[0], 5, seed=2)[:2])
    other["hessian.kron.A"] = one["hessian.kron.A"]
    first = Kron.from_hessian(one, PRIOR, LAYOUTS[0])
    eye = torch.eye(15, dtype=torch.float64)
    for hessian in (one, other):
        moved = Kron.from_hessian(hessian, prior, LAYOUTS[0], before=first)
        assert (moved.feature_basis is first.feature_basis) == (moved.bias_unit == first.bias_unit)
        assert torch.equal(moved.unwhiten(eye), Kron.from_hessian(hessian, prior, LAYOUTS[0]).unwhiten(eye))


@every_layout
@pytest.mark.parametrize("most_full", [2048, 0])
def test_the_mode_is_the_one_scipy_finds(layout: HeadLayout, most_full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "MAX_FULL_PRECONDITIONER", most_full)
    target = make_target(layout)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        one = torch.tensor(theta, requires_grad=True)
        value = -log_joint_written_out(target, one)
        return value.item(), torch.autograd.grad(value, one)[0].numpy()

    start = np.zeros(layout.num_params)
    expected = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-9})
    found = find_mode(target, torch.zeros(layout.num_params), tolerance=1e-8)
    np.testing.assert_allclose(found.theta.numpy(), expected.x, atol=1e-6)
    assert found.log_joint == pytest.approx(-expected.fun, rel=1e-10)


@every_layout
def test_minibatch_gradients_average_to_that_of_all_data(layout: HeadLayout) -> None:
    target = make_target(layout)
    theta = draw_theta(layout, 5, seed=2)
    parts = [
        target.minibatch(*target.examples(index)).log_joint_and_grad(theta) for index in torch.arange(40).split(20)
    ]
    for mean, exact in zip(
        (torch.stack(pair).mean(dim=0) for pair in zip(*parts, strict=True)),
        target.log_joint_and_grad(theta),
        strict=True,
    ):
        torch.testing.assert_close(mean, exact)


@pytest.mark.parametrize("criterion", ["val", "marglik"])
@pytest.mark.parametrize("bias_precision", [0.05, 1.0, None])
def test_a_search_varies_the_weights_precision_alone(bias_precision: float | None, criterion: str) -> None:
    target = make_target(LAYOUTS[0], prior=Prior(1.0, bias_precision))
    start = torch.zeros(target.layout.num_params)
    found = search(
        target, start=start, generator=seeded(), criterion=criterion,
        held_out=target.held_out(target.features[:20], target.labels[:20]), bounds=(0.1, 10.0), tolerance=0,
    )  # fmt: skip
    assert found.fit.gaussian.prior == Prior(found.best, bias_precision)
    if criterion == "marglik":
        for precision, value in found.curve:
            alone = fit_gaussian(target.with_prior(Prior(precision, bias_precision)), start=start)
            assert value == pytest.approx(
                -alone.log_marginal_likelihood, abs=5e-3
            )  # of modes found to 1e-3 standard deviations


@pytest.mark.parametrize("own", [Prior(3.0, 0.2), Prior(3.0)], ids=str)
@pytest.mark.parametrize("base", [PRIOR, Prior(2.0)], ids=str)
def test_the_base_of_a_stored_flow_keeps_its_own_prior(base: Prior, own: Prior) -> None:
    gaussian = gaussian_at_mode(make_target(LAYOUTS[0], prior=base))
    layers = build_layers("radial", gaussian.layout, seeded(), length=1)
    tensors, meta = Flow(gaussian, layers, "radial").to_tensors()
    tensors |= own.to_tensors()
    assert Flow.from_tensors(tensors, json.loads(json.dumps(meta))).base.prior == base
    assert Prior.from_tensors(tensors) == own


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_stored_gaussian_keeps_its_prior(structure: str) -> None:
    gaussian = gaussian_at_mode(make_target(LAYOUTS[0]), structure)
    again = Gaussian.from_tensors(*gaussian.to_tensors())
    assert again.prior == PRIOR
    one = torch.ones(1, 15, dtype=torch.float64)
    assert torch.equal(again.covariance.unwhiten(one), gaussian.covariance.unwhiten(one))


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_gaussian_needs_no_prior_until_it_is_asked_for_one(structure: str) -> None:
    fitted = gaussian_at_mode(make_target(LAYOUTS[0]), structure)
    bare = replace(fitted, prior=None)
    with pytest.raises(DataError, match="the Gaussian has no prior"):
        bare.require_prior()
    flow = Flow(bare, build_layers("radial", bare.layout, seeded(), length=1), "radial")
    noise = bare.noise(3, seeded())
    for one in (bare, flow):
        tensors, meta = one.to_tensors()
        again = type(one).from_tensors(tensors | PRIOR.to_tensors() if one is flow else tensors, meta)
        assert torch.equal(again.from_noise(noise)[0], one.from_noise(noise)[0])
    if structure != "kron":  # whose roots are made from the prior's precisions
        assert not [name for name in bare.to_tensors()[0] if "prior" in name]
        assert Gaussian.from_tensors(*bare.to_tensors()).prior is None


def test_metadata_tells_a_bias_precision_where_there_is_one() -> None:
    assert PRIOR.to_meta() == {"prior_precision": 2.0, "bias_precision": 0.05}
    assert Prior(2.0).to_meta() == Prior(2.0, 2.0).to_meta() == {"prior_precision": 2.0}
    assert Prior.from_meta({}) is None
    assert Prior.from_meta(PRIOR.to_meta()) == PRIOR
    assert Prior.from_meta({"prior_precision": 2, "bias_precision": 2.0}) == Prior(2.0)
    assert Prior.from_meta({"prior_precision": 2, "bias_precision": None}) == Prior(2.0)
    assert (str(PRIOR), str(Prior(2.0))) == ("2 (bias 0.05)", "2")


@pytest.mark.parametrize(
    "meta",
    [
        {"prior_precision": 0},
        {"prior_precision": "2"},
        {"prior_precision": True},
        {"prior_precision": 1, "bias_precision": -1.0},
        {"prior_precision": 1, "bias_precision": math.inf},
        {"prior_precision": 1, "bias_precision": [1]},
    ],
    ids=str,
)
def test_what_is_no_precision_is_refused(meta: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Prior.from_meta(meta)


def test_priors_are_close_when_both_precisions_are() -> None:
    assert PRIOR.is_close(Prior(2.0 * (1 + 1e-12), 0.05))
    assert Prior(2.0).is_close(Prior(2.0, 2.0))
    assert not PRIOR.is_close(Prior(2.0))
    assert not PRIOR.is_close(Prior(2.0, 0.0501))


def test_a_prior_of_parts_is_its_diagonal_everywhere_and_is_read_as_it_was_written() -> None:
    layout = LAYOUTS[0]
    prior = Prior.of_parts([2.0, 0.05], layout)
    diagonal = prior.diagonal(layout)
    assert diagonal.tolist() == [2.0] * 12 + [0.05] * 3
    assert prior.weight_precision == pytest.approx(float(diagonal.log().mean().exp()))
    theta = draw_theta(layout).unsqueeze(0)
    expected = torch.distributions.Normal(0, diagonal.rsqrt()).log_prob(theta).sum(dim=1)
    torch.testing.assert_close(prior.log_density(theta, layout), expected)
    torch.testing.assert_close(prior.gradient(theta, layout), -diagonal * theta)
    assert not prior.is_isotropic
    assert Prior.from_meta(prior.to_meta()) == Prior.from_tensors(prior.to_tensors()) == prior
    assert prior.is_close(prior)
    assert not prior.is_close(Prior(prior.weight_precision))
    scaled = prior.with_weight_precision(3 * prior.weight_precision)
    torch.testing.assert_close(scaled.diagonal(layout), 3 * diagonal)


every_layout_about_a_mean = pytest.mark.parametrize("layout", [THREE, ONE], ids=str)


def about(layout: HeadLayout) -> Prior:
    """Weights of precision 2 and biases of 0.05 about a mean that is far from zero."""
    return Prior(2.0, 0.05).with_mean(3 * draw_theta(layout, seed=5), 0.5)


def target_about_a_mean(layout: HeadLayout) -> LastLayerTarget:
    return head_target(layout, 40, labels=by_noisy_sign, prior=about(layout))


def log_joint_about_a_mean(target: LastLayerTarget, theta: Tensor) -> Tensor:
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


@every_layout_about_a_mean
def test_value_gradient_and_hessian_are_those_written_out(layout: HeadLayout) -> None:
    target, theta = target_about_a_mean(layout), draw_theta(layout, 5, seed=2)
    values, gradients = target.log_joint_and_grad(theta)
    batch = target.minibatch(*target.examples(torch.arange(40))).log_joint_and_grad(theta)
    for one, value, gradient in zip(theta, values, gradients, strict=True):
        expected = log_joint_about_a_mean(target, one.requires_grad_())
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, one)[0])
    torch.testing.assert_close(batch, (values, gradients))
    hessian = -torch.autograd.functional.hessian(partial(log_joint_about_a_mean, target), theta[0].detach())
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    torch.testing.assert_close(target.hessian_vector_product(theta[0].detach(), eye), hessian)


@every_layout_about_a_mean
def test_the_mode_is_the_one_scipy_finds_under_the_shifted_penalty_and_with_the_mean_as_an_offset(
    layout: HeadLayout,
) -> None:
    target = target_about_a_mean(layout)
    found = find_mode(target, torch.zeros(layout.num_params), tolerance=1e-8).theta
    shifted = minimum(partial(lambda theta: -log_joint_about_a_mean(target, theta)), layout.num_params)
    offset = minimum(partial(loss_of_offset, target), layout.num_params)
    torch.testing.assert_close(found, shifted, rtol=0, atol=1e-6)
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


@every_layout_about_a_mean
def test_the_coarse_gradient_is_that_of_the_target_but_for_rounding(layout: HeadLayout) -> None:
    target, anchor = target_about_a_mean(layout), draw_theta(layout, seed=7)
    displacement = 0.1 * draw_theta(layout, 3, seed=8)
    found = CoarseGradient.about(target, anchor, "tf32")(displacement)
    torch.testing.assert_close(found, target.log_joint_and_grad(anchor + displacement)[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("criterion", ["val", "marglik"])
def test_a_search_keeps_the_mean_and_its_strongest_prior_is_the_mean_itself(criterion: str) -> None:
    target = target_about_a_mean(THREE)
    start = draw_theta(THREE, seed=9)
    found = search(
        target, start=start, generator=seeded(), criterion=criterion,
        held_out=target.held_out(target.features[:20], target.labels[:20]), bounds=(1e12, 1e12),
    )  # fmt: skip
    gaussian, mean = found.fit.gaussian, target.prior.mean
    assert gaussian.require_prior() == target.prior.with_weight_precision(found.best)
    weights = slice(0, THREE.num_outputs * THREE.num_features)
    torch.testing.assert_close(gaussian.mean[weights], mean[weights], rtol=0, atol=1e-9)


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_stored_gaussian_keeps_the_mean_of_its_prior(structure: str) -> None:
    gaussian = gaussian_at_mode(target_about_a_mean(THREE), structure)
    tensors, meta = gaussian.to_tensors()
    prior = Gaussian.from_tensors(tensors, json.loads(json.dumps(meta))).prior
    assert prior == about(THREE)
    assert Prior.from_meta(json.loads(json.dumps(about(THREE).to_meta())), mean=tensors["prior.mean"]) == prior


def test_priors_about_other_means_are_other_priors() -> None:
    prior = about(THREE)
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
    target, theta = target_about_a_mean(THREE), draw_theta(THREE)
    varying = torch.tensor([0, 3, 14])
    fixed = [place for place in range(THREE.num_params) if place not in varying]
    covariance = SimpleNamespace(varying=varying, num_varying=3)
    assert target.prior.mean is not None
    scale = target.prior.diagonal(THREE).rsqrt()
    expected = torch.distributions.Normal(target.prior.mean, scale).log_prob(theta)[fixed].sum()
    assert fixed_log_prior(target, theta, covariance) == pytest.approx(float(expected))  # type: ignore[arg-type]
