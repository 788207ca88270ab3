"""Draws by sample-then-optimise: their mean and covariance against the dense inverse, and what the conjugate gradients promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import tiny_target
from torch import Tensor

from bnncli.covariances.diag import Diag
from bnncli.curvature import ggn
from bnncli.errors import NumericError, UsageError
from bnncli.inference import laplace as module
from bnncli.inference.laplace import fit_gaussian, linear_draws, precision_operator, right_sides, solve
from bnncli.integrators import load_integrator
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.linear_draws import LinearDraws
from bnncli.targets.network import NetworkTarget

PRIOR = Prior(2.0, 0.5)
every_output = pytest.mark.parametrize("outputs", [3, 1])


def dense(target: NetworkTarget) -> Tensor:
    """H + Lambda."""
    return ggn(target, target.layout.trained(), "full")["hessian.full"] + target.prior.diagonal(target.layout).diag()


def gaussian(target: NetworkTarget, structure: str = "full") -> Gaussian[Any]:
    return fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint").gaussian


def drawn(target: NetworkTarget, num_draws: int, structure: str = "diag", **given: Any) -> Tensor:
    base = gaussian(target, structure)
    return linear_draws(target, base.mean, base.covariance, num_draws=num_draws, generator=seeded(1), **given).values


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
    monkeypatch.setattr("bnncli.inference.laplace.pairs_at_once", lambda *given: pairs)
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
        found = linear_draws(target, base.mean, base.covariance, num_draws=8, generator=seeded(1))
        assert found.residual <= 2e-2
        assert found.num_passes == found.num_steps + 2
        steps[structure] = found.num_steps
    assert steps["full"] == 1 < min(steps["kron"], steps["diag"])


def test_a_solution_that_is_there_takes_no_more_products() -> None:
    counts = []
    matrix = torch.diag(torch.tensor([1.0, 1.0, 5.0, 9.0], dtype=torch.float64))

    def multiply(rows: Tensor) -> Tensor:
        counts.append(len(rows))
        return rows @ matrix

    sides = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    found = solve(multiply, sides, Diag(torch.ones(4, dtype=torch.float64)), tolerance=1e-10)
    torch.testing.assert_close(found.values, sides @ torch.linalg.inv(matrix))
    assert counts == [2, 1, 1, 2]


def test_what_does_not_converge_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 2)
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
