"""The Laplace fit against dense algebra and a two-parameter posterior on a grid."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from problems.heads import LAYOUTS, by_noisy_sign, every_layout, head_target

from bnncli import registry
from bnncli.inference.laplace import MOST_MODEL_ERROR, fit_gaussian, laplace_evidence
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget

pytestmark = pytest.mark.core

make_target = partial(head_target, num_examples=40, labels=by_noisy_sign, prior=0.5)
every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))


def start(layout: HeadLayout) -> torch.Tensor:
    return torch.ones(layout.num_params, dtype=torch.float64)


@every_layout
def test_full_covariance_is_the_inverse_hessian_of_the_log_posterior(layout: HeadLayout) -> None:
    target = make_target(layout)
    fit = fit_gaussian(target, start=start(layout))
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    precision = target.hessian_vector_product(fit.gaussian.mean, eye)
    root = fit.gaussian.covariance.unwhiten(eye)
    torch.testing.assert_close(root.T @ root, torch.linalg.inv(precision))


@every_layout
def test_evidence_is_laplaces_formula(layout: HeadLayout) -> None:
    target = make_target(layout)
    fit = fit_gaussian(target, start=start(layout))
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    log_det = float(torch.linalg.slogdet(target.hessian_vector_product(fit.gaussian.mean, eye))[1])
    joint = target.log_joint(fit.gaussian.mean[None]).item()
    expected = joint + 0.5 * layout.num_params * math.log(2 * math.pi) - 0.5 * log_det
    assert fit.log_marginal_likelihood == pytest.approx(expected, rel=1e-10)


@every_layout
@every_structure
@pytest.mark.parametrize("precision", [0.02, 0.5, 40.0])
def test_evidence_is_that_of_the_eigenvalues_of_the_data_hessian(
    structure: str, layout: HeadLayout, precision: float
) -> None:
    target = replace(make_target(layout), prior=Prior(precision))
    fit = fit_gaussian(target, start=start(layout), structure=structure)
    theta = fit.gaussian.mean

    def loss(theta: torch.Tensor) -> torch.Tensor:
        logits = layout.logits(target.features, theta[None])[0]
        if layout.num_outputs == 1:
            return torch.nn.functional.binary_cross_entropy_with_logits(
                logits[:, 0], target.labels.double(), reduction="sum"
            )
        return torch.nn.functional.cross_entropy(logits, target.labels, reduction="sum")

    eigenvalues = eigenvalues_of(structure, torch.autograd.functional.hessian(loss, theta), target, theta)
    shrunk = float((eigenvalues / precision).clamp(min=0).log1p().sum())
    expected = -loss(theta).item() - 0.5 * precision * float(theta @ theta) - 0.5 * shrunk
    assert fit.log_marginal_likelihood == pytest.approx(expected, rel=1e-9)


def eigenvalues_of(structure: str, hessian: torch.Tensor, target: LastLayerTarget, theta: torch.Tensor) -> torch.Tensor:
    """Eigenvalues of the structure's part of the Hessian (P, P) of the loss."""
    layout = target.layout
    if structure == "full":
        return torch.linalg.eigvalsh(hessian)
    if structure == "diag":
        return hessian.diagonal()
    size, num_weights = layout.num_features + layout.has_bias, layout.num_outputs * layout.num_features
    if structure == "block":
        places = [
            [*range(k * layout.num_features, (k + 1) * layout.num_features), *([num_weights + k] * layout.has_bias)]
            for k in range(layout.num_outputs)
        ]
        return torch.cat([torch.linalg.eigvalsh(hessian[own][:, own]) for own in places])
    features = target.features
    if layout.has_bias:
        features = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], dim=1)
    logits = layout.logits(target.features, theta[None])[0]
    if layout.num_outputs == 1:
        probs = logits.sigmoid()
        curvature = (probs * (1 - probs)).mean().view(1, 1)
    else:
        probs = logits.softmax(dim=1)
        curvature = probs.mean(dim=0).diag() - probs.T @ probs / len(probs)
    assert features.shape[1] == size
    return torch.outer(torch.linalg.eigvalsh(features.T @ features), torch.linalg.eigvalsh(curvature)).flatten()


@pytest.mark.parametrize("layout", [HeadLayout(1, 1), HeadLayout(1, 2, has_bias=False)], ids=str)
def test_with_much_data_it_is_the_posterior_on_a_grid(layout: HeadLayout) -> None:
    target = make_target(layout, num_examples=2000)
    fit = fit_gaussian(target, start=start(layout))
    offsets = torch.linspace(-8, 8, 81, dtype=torch.float64)
    z = torch.cartesian_prod(offsets, offsets)
    theta = fit.gaussian.mean + fit.gaussian.covariance.unwhiten(z)
    log_density = target.log_joint(theta)
    cell = math.log(0.2**2) + fit.gaussian.covariance.log_det_scale()
    log_evidence = float(log_density.logsumexp(dim=0)) + cell
    assert fit.log_marginal_likelihood == pytest.approx(log_evidence, abs=0.02)
    weights = log_density.softmax(dim=0)
    assert (weights @ z).norm() < 0.15  # posterior standard deviations
    torch.testing.assert_close((z.T * weights) @ z, torch.eye(2, dtype=torch.float64), rtol=0, atol=0.05)


@every_structure
def test_center_checkpoint_stays_where_the_network_is(structure: str) -> None:
    theta = start(LAYOUTS[0])
    fit = fit_gaussian(make_target(LAYOUTS[0]), start=theta, structure=structure, center="checkpoint")
    assert torch.equal(fit.gaussian.mean, theta)
    assert fit.mode is None


def evidence_on_a_grid(target: LastLayerTarget) -> float:
    """Exact to 1e-6 nats: the integral over theta (2,), on a grid of 12 posterior standard deviations to each side."""
    fit = fit_gaussian(target, start=start(target.layout))
    offsets = torch.linspace(-12, 12, 97, dtype=torch.float64)
    theta = fit.gaussian.mean + fit.gaussian.covariance.unwhiten(torch.cartesian_prod(offsets, offsets))
    return (
        float(target.log_joint(theta).logsumexp(dim=0)) + 2 * math.log(0.25) + fit.gaussian.covariance.log_det_scale()
    )


@pytest.mark.parametrize("layout", [HeadLayout(1, 1), HeadLayout(1, 2, has_bias=False)], ids=str)
@pytest.mark.parametrize("distance", [0.0, 0.5, 1.0, 2.0])
def test_the_evidence_beside_the_mode_is_that_of_the_integral(layout: HeadLayout, distance: float) -> None:
    target = make_target(layout, num_examples=2000)
    at_mode = fit_gaussian(target, start=start(layout))
    shift = at_mode.gaussian.covariance.unwhiten(torch.full((1, 2), distance / math.sqrt(2), dtype=torch.float64))[0]
    fit = fit_gaussian(target, start=at_mode.gaussian.mean + shift, center="checkpoint")
    assert fit.no_evidence is None
    assert fit.log_marginal_likelihood == pytest.approx(evidence_on_a_grid(target), abs=0.02 + 0.09 * distance)
    # Without the gradient's term it would be wrong by half the squared distance.
    rise = fit.log_marginal_likelihood - laplace_evidence(fit.log_joint, fit.gaussian.covariance)
    assert rise == pytest.approx(0.5 * distance**2, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("distance", [0.5, 2.0, 4.0, 8.0, 16.0])
def test_an_evidence_that_is_given_is_near_the_integral(distance: float) -> None:
    target = make_target(HeadLayout(1, 2, has_bias=False), num_examples=200)
    at_mode = fit_gaussian(target, start=start(target.layout))
    exact, given = evidence_on_a_grid(target), 0
    for angle in torch.linspace(0, 2 * math.pi, 13)[:-1].tolist():
        direction = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        shifted = at_mode.gaussian.mean + at_mode.gaussian.covariance.unwhiten(distance * direction)[0]
        fit = fit_gaussian(target, start=shifted, center="checkpoint")
        if fit.log_marginal_likelihood is not None:
            given += 1
            assert fit.log_marginal_likelihood == pytest.approx(exact, abs=2 * MOST_MODEL_ERROR)
    assert (given == 12) if distance < 1 else (given == 0) if distance > 10 else True


def test_the_evidence_beside_the_mode_is_exact_where_the_log_joint_is_quadratic() -> None:
    features, labels = torch.zeros(5, 2, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0])
    target = LastLayerTarget(features, labels, HeadLayout(1, 2, has_bias=False), Prior(3.0))
    fit = fit_gaussian(target, start=torch.tensor([4.0, -7.0], dtype=torch.float64), center="checkpoint")
    assert fit.log_marginal_likelihood == pytest.approx(-5 * math.log(2), rel=1e-12)


def test_far_from_the_mode_there_is_no_evidence_and_the_reason_is_told() -> None:
    target = make_target(LAYOUTS[0])
    fit = fit_gaussian(target, start=40 * start(LAYOUTS[0]), center="checkpoint")
    assert fit.log_marginal_likelihood is None
    assert fit.no_evidence is not None
    assert "off by" in fit.no_evidence


@every_structure
def test_beside_the_mode_only_the_exact_hessian_gives_an_evidence(structure: str) -> None:
    target = make_target(LAYOUTS[0])
    near = fit_gaussian(target, start=start(LAYOUTS[0])).gaussian.mean + 1e-3
    fit = fit_gaussian(target, start=near, structure=structure, center="checkpoint")
    assert (fit.log_marginal_likelihood is None) == (structure != "full")
    assert (fit.no_evidence is None) == (structure == "full")
