"""The validation loss of Gaussians over networks: that of the network linearised at the mean, against autograd and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems.seeds import antithetic, seeded
from problems.tiny_networks import tiny_target
from torch import Tensor

from bnncli.covariances import num_varying
from bnncli.inference.memory import NUM_DRAWS
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_criterion import linearised_losses, noise_size, shared_by
from bnncli.inference.prior_search import search
from bnncli.numerics.random import quasi_normal
from bnncli.parameters.prior import Prior
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import HeldOutInputs, NetworkTarget


def held_out_of(target: NetworkTarget) -> HeldOutInputs:
    inputs = torch.randn(9, 4, generator=seeded(8), dtype=torch.float64)
    return target.held_out(inputs, torch.arange(9) % target.layout.num_classes)


def linearisation(target: NetworkTarget, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, K) as trained, and their derivatives (n, K, P), by autograd."""
    theta = target.layout.trained()
    jacobian = torch.autograd.functional.jacobian(lambda one: target.layout.logits(inputs, one[None])[0], theta)
    return target.layout.logits(inputs, theta[None])[0], jacobian


@pytest.mark.parametrize("structure", ["full", "low-rank", "subnetwork"])
def test_draws_of_theta_move_the_logits_along_their_derivatives(structure: str) -> None:
    target = tiny_target(3, prior=Prior(0.2), choice=CurvatureChoice(size=9))
    held, theta = held_out_of(target), target.layout.trained()
    covariance = covariance_at(target, theta, structure).covariance
    noise = torch.randn(6, noise_size(target.layout, structure, 6), generator=seeded(3), dtype=torch.float64)
    logits, jacobian = linearisation(target, held.target.inputs)
    drawn = logits + torch.einsum("nkp,sp->snk", jacobian, covariance.unwhiten(noise[:, : num_varying(covariance)]))
    probs = drawn.softmax(dim=2).mean(dim=0)
    expected = -probs[torch.arange(9), held.target.labels].log()
    torch.testing.assert_close(linearised_losses(held, target, theta, [covariance], noise=noise)[0], expected)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block"])
def test_draws_of_the_logits_have_their_linearised_variance(structure: str) -> None:
    """A single logit: sigma's mean under N(m, J Sigma J^T), Sigma multiplied out, by Gauss-Hermite quadrature."""
    target = tiny_target(1, prior=Prior(0.2, 0.1))
    held, theta = held_out_of(target), target.layout.trained()
    covariance = covariance_at(target, theta, structure).covariance
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logits, jacobian = linearisation(target, held.target.inputs)
    root = covariance.unwhiten(torch.eye(len(theta), dtype=torch.float64))
    spread = (jacobian[:, 0] @ root.T).norm(dim=1)
    signs = 2 * held.target.labels.double() - 1
    points = signs[:, None] * (logits + spread[:, None] * torch.from_numpy(nodes))
    expected = -(points.sigmoid() @ torch.from_numpy(weights / weights.sum())).log()
    # The normals are their own quantiles: an average over them is nearly the integral.
    noise = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000).unsqueeze(1)
    assert noise_size(target.layout, structure, 4000) == 1
    found = linearised_losses(held, target, theta, [covariance], noise=noise)[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block"])
def test_covariances_that_are_judged_together_are_judged_as_alone(structure: str) -> None:
    target = tiny_target(3)
    held, theta = held_out_of(target), target.layout.trained()
    assert shared_by(target.layout, structure, 8) > 3
    noise = torch.randn(8, 3, generator=seeded(3), dtype=torch.float64)
    priors = Prior(0.2), Prior(3.0, 0.1), Prior(50.0)
    hessian = covariance_at(target, theta, structure).hessian
    some = [covariance_at(target.with_prior(one), theta, structure, hessian=hessian).covariance for one in priors]
    some.append(covariance_at(target, theta + 1, structure).covariance)  # in other bases, where there are any
    alone = torch.cat([linearised_losses(held, target, theta, [one], noise=noise) for one in some])
    assert (alone[0] - alone[2]).abs().max() > 0.01
    torch.testing.assert_close(linearised_losses(held, target, theta, some, noise=noise), alone)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_search_by_val_judges_what_predicts(structure: str) -> None:
    target = tiny_target(3)
    held, theta = held_out_of(target), target.layout.trained()
    found = search(
        target,
        start=theta,
        generator=seeded(2),
        structure=structure,
        center="checkpoint",
        held_out=held,
        bounds=(1e-2, 1e2),
    )
    if structure == "kron":
        noise = quasi_normal(NUM_DRAWS, 3, seeded(2))
    else:
        noise = antithetic(NUM_DRAWS, target.layout.num_params, 2)
    for precision, value in found.curve:
        covariance = covariance_at(target.with_prior(Prior(precision, 0.5)), theta, structure).covariance
        expected = linearised_losses(held, target, theta, [covariance], noise=noise)[0].mean()
        assert value == pytest.approx(float(expected), rel=1e-9)
