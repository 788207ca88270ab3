"""Linearised networks: draws and validation losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems.seeds import antithetic, seeded
from problems.tiny_networks import tiny_target
from torch import Tensor

from bnncli.errors import NumericError, UsageError
from bnncli.inference import linear_draws
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.linear_draws import draw_linearised, precision_operator, right_sides, solve
from bnncli.inference.memory import NUM_DRAWS
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_criterion import covariances_at_once, linearised_losses, noise_size
from bnncli.inference.prior_search import search
from bnncli.integrators import load_integrator
from bnncli.numerics.random import quasi_normal
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.linear_draws import LinearDraws
from bnncli.structures import ggn, num_varying
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
    assert covariances_at_once(target.layout, structure, 8) > 3
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
        target, start=theta, generator=seeded(2), structure=structure, center="checkpoint", held_out=held,
        bounds=(1e-2, 1e2),
    )  # fmt: skip
    if structure == "kron":
        noise = quasi_normal(NUM_DRAWS, 3, seeded(2))
    else:
        noise = antithetic(NUM_DRAWS, target.layout.num_params, 2)
    for precision, value in found.curve:
        covariance = covariance_at(target.with_prior(Prior(precision, 0.5)), theta, structure).covariance
        expected = linearised_losses(held, target, theta, [covariance], noise=noise)[0].mean()
        assert value == pytest.approx(float(expected), rel=1e-9)


PRIOR = Prior(2.0, 0.5)
every_output = pytest.mark.parametrize("outputs", [3, 1])


def dense(target: NetworkTarget) -> Tensor:
    """H + Lambda."""
    return ggn(target, target.layout.trained(), "full")["hessian.full"] + target.prior.diagonal(target.layout).diag()


def gaussian(target: NetworkTarget, structure: str = "full") -> Gaussian[Any]:
    return fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint").gaussian


def drawn(target: NetworkTarget, num_draws: int, structure: str = "diag", **given: Any) -> Tensor:
    base = gaussian(target, structure)
    return draw_linearised(target, base.mean, base.covariance, num_draws=num_draws, generator=seeded(1), **given).values


@every_output
@pytest.mark.parametrize("at_once", [1, 10**9])
def test_each_random_number_has_its_part_of_the_covariance(
    outputs: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws are linear in their normals z, d = A z: unit vectors give A, and A A^T is the covariance."""
    target = replace(tiny_target(outputs, examples=16, prior=PRIOR), likelihood_scale=3.0)
    monkeypatch.setattr(NetworkTarget, "rows_at_once", lambda self, *given: min(at_once, self.num_examples))
    theta, size = target.layout.trained(), target.layout.num_params
    count = size + 16 * outputs  # as many columns as the root of the likelihood's Hessian has
    units, taken = torch.eye(count, dtype=torch.float64), [0]

    def normals(*shape: int) -> Tensor:
        """Of so many of the random numbers the unit vectors, one a draw; draws are the first or the second axis."""
        width = shape[1] if len(shape) == 2 else shape[0] * shape[2]
        columns = units[:, taken[0] : taken[0] + width]
        taken[0] += width
        return columns if len(shape) == 2 else columns.unflatten(1, (shape[0], shape[2])).transpose(0, 1)

    sides = right_sides(target, theta, count, normals)
    assert taken == [count]
    torch.testing.assert_close(sides.T @ sides, dense(target))
    found = solve(precision_operator(target, theta), sides, gaussian(target).covariance, tolerance=1e-9).values
    torch.testing.assert_close(found.T @ found, torch.linalg.inv(dense(target)), rtol=1e-6, atol=1e-9)


def test_draws_have_the_gaussians_mean_and_covariance() -> None:
    target = tiny_target(prior=PRIOR)
    size = 2000
    found, expected = drawn(target, size), torch.linalg.inv(dense(target))
    spread = expected.diagonal().sqrt()
    assert float((found.mean(dim=0) / spread).abs().max()) < 4.5 * size**-0.5
    wrong = (found.T @ found / size - expected) / torch.outer(spread, spread)
    assert float(wrong.abs().max()) < 5 * (2 / size) ** 0.5
    assert float(wrong.square().mean().sqrt()) < 1.5 * size**-0.5


@pytest.mark.parametrize("pairs", [10**9, 60, 1])
@pytest.mark.parametrize("rows", [10**9, 7])
def test_the_product_is_the_dense_one(rows: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vectors, and examples, go through the network in several blocks."""
    target = replace(tiny_target(prior=PRIOR), likelihood_scale=3.0)
    monkeypatch.setattr(NetworkTarget, "rows_at_once", lambda self, *given: min(rows, self.num_examples))
    monkeypatch.setattr("bnncli.inference.linear_draws.pairs_at_once", lambda *given: pairs)
    vectors = torch.randn(5, target.layout.num_params, generator=seeded(2), dtype=torch.float64)
    torch.testing.assert_close(precision_operator(target, target.layout.trained())(vectors), vectors @ dense(target))


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_errors_in_standard_deviations_are_of_the_size_of_the_tolerance(tolerance: float) -> None:
    target = tiny_target(prior=Prior(0.1))
    wrong = drawn(target, 40, "kron", tolerance=tolerance) - drawn(target, 40, "full", tolerance=1e-10)
    in_deviations = ((wrong @ dense(target)) * wrong).sum(dim=1).sqrt() / target.layout.num_params**0.5
    assert float(in_deviations.max()) < 5 * tolerance


def test_the_exact_gaussian_needs_a_single_step() -> None:
    target = tiny_target(prior=Prior(0.1))
    steps = {}
    for structure in ("diag", "kron", "full"):
        base = gaussian(target, structure)
        found = draw_linearised(target, base.mean, base.covariance, num_draws=8, generator=seeded(1))
        assert found.residual <= 2e-2
        assert found.num_passes == found.num_steps + 2
        steps[structure] = found.num_steps
    assert steps["full"] == 1 < min(steps["kron"], steps["diag"])


def test_what_does_not_converge_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_draws, "MOST_STEPS", 2)
    with pytest.raises(NumericError, match=r"left residuals of .* after 2 steps"):
        drawn(tiny_target(prior=Prior(1e-3)), 3)


def test_draws_predict_as_the_linearised_network() -> None:
    target = tiny_target(prior=PRIOR)
    theta, inputs = target.layout.trained(), target.inputs[:6]
    deviations = drawn(target, 30)
    q = LinearDraws(theta, deviations, target.layout, PRIOR)
    jacobian = target.layout.jacobian(inputs, theta)
    center = target.layout.logits(inputs, theta.unsqueeze(0))[0]
    moved = center + torch.einsum("nkp,sp->snk", jacobian, deviations)
    mean, covariance = q.logit_moments(inputs)
    torch.testing.assert_close(mean, center)
    torch.testing.assert_close(covariance, torch.einsum("snk,snl->nkl", moved - center, moved - center) / 30)
    predicted = load_integrator("logit-mc").predict(q, inputs, num_samples=None, generator=seeded(0))
    torch.testing.assert_close(predicted.probs.double(), moved.softmax(2).mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.sample(None, seeded(0)), (theta + deviations).float())
    with pytest.raises(UsageError, match="expected at most 30"):
        q.sample(31, seeded(0))
    tensors, meta = q.to_tensors()
    again = LinearDraws.from_tensors(tensors, meta)
    assert (again.layout, again.prior, meta["default_samples"]) == (q.layout, PRIOR, 30)
    assert torch.equal(again.deviations, deviations.float())
