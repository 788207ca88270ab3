"""SGHMC and SGLD: the stationary moments of Gaussians with their known bias, a posterior by importance weights, resuming to the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems.heads import by_noisy_sign, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.covariances.full import Full
from bnncli.errors import Interrupted, NumericError
from bnncli.inference.dynamics import MemoryDraws, WhiteCoordinates
from bnncli.inference.sghmc import SghmcPlan, inflation, largest_curvature, mean_square, preconditioner, sample_sghmc
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SilentProgress
from bnncli.targets.last_layer import LastLayerTarget

N = 12
ALL = 10**6
PLAN = SghmcPlan(150, 1, 10, 45, ALL, 0.5, 0.5, is_cyclical=False)


def gaussian_target() -> LastLayerTarget:
    """The prior alone, N(0, diag(1/4, 1/4, 1)): weights with precision 4, biases with 1."""
    return head_target(HeadLayout(1, 2), N, prior=Prior(4.0, 1.0), likelihood_scale=0.0)


def draws_of(
    target: LastLayerTarget,
    plan: SghmcPlan,
    num_chains: int = 400,
    start: float = 0.0,
    whitening: WhiteCoordinates | None = None,
) -> Tensor:
    zeros = torch.full((num_chains, target.layout.num_params), start, dtype=torch.float64)
    return sample_sghmc(target, plan, start=zeros, generator=seeded(), whitening=whitening).draws.double()


def whitening_by(base: Gaussian) -> WhiteCoordinates:
    return WhiteCoordinates.of(base, "cpu", torch.float64)


def assert_variances(draws: Tensor, expected: Tensor) -> None:
    """Of draws (C, T, P), within 4 standard errors between chains, and means at zero."""
    second = draws.square().mean(dim=1)
    error = second.std(dim=0) / math.sqrt(len(draws))
    assert ((second.mean(dim=0) - expected).abs() < 4 * error).all(), (second.mean(dim=0), expected, error)
    first = draws.mean(dim=1)
    assert (first.mean(dim=0).abs() < 4 * first.std(dim=0) / math.sqrt(len(draws))).all()


@pytest.mark.parametrize("decay", [0.2, 1.0])
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.25, marks=pytest.mark.long)])
@pytest.mark.parametrize("rate", [0.6, 3.0])
def test_variances_on_a_gaussian_are_those_of_the_formula(decay: float, temperature: float, rate: float) -> None:
    plan = replace(PLAN, momentum_decay=decay, temperature=temperature, learning_rate=rate)
    h = torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)
    expected = temperature / h / (1 - rate / N * h / (2 * (2 - decay)))
    assert_variances(draws_of(gaussian_target(), plan), expected)
    assert inflation(plan, 4.0, N, rate)[0] == pytest.approx(float(expected[0] * 4 / temperature) - 1)


def test_in_the_coordinates_of_a_gaussian_the_variances_are_those_of_its_directions() -> None:
    """Of N(0, diag(1/4, 1/4, 1)) by the covariance of another, S = L L^T: the formula holds for each eigenvector of L^T H L."""
    root = torch.tensor([[0.5, 0.0, 0.0], [0.3, 0.6, 0.0], [-0.4, 0.2, 0.9]], dtype=torch.float64)
    target, plan = gaussian_target(), replace(PLAN, learning_rate=6.0, momentum_decay=0.3)
    base = Gaussian(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), Full(root), target.layout)
    draws = draws_of(target, plan, whitening=whitening_by(base))
    values, vectors = torch.linalg.eigh(root.T @ torch.diag(torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)) @ root)
    along = torch.linalg.solve_triangular(root, draws.unsqueeze(-1), upper=False).squeeze(-1) @ vectors
    assert_variances(along, 1 / values / (1 - 6.0 / N * values / (2 * (2 - 0.3))))


def test_a_cycle_explores_without_noise_and_samples_at_its_end() -> None:
    """With no noise at all the chains would fall to zero and stay; all that they have at a cycle's end comes of its last part."""
    plan = SghmcPlan(20, 2, 3, 7, ALL, 1.0, 0.9)
    assert [epoch for epoch in range(20) if plan.is_kept(epoch)] == [7, 8, 9, 17, 18, 19]
    assert [epoch for epoch in range(20) if not plan.is_exploring(epoch)] == [7, 8, 9, 17, 18, 19]
    draws = draws_of(gaussian_target(), replace(plan, epochs=300, num_exploring=75), 200, start=3.0)
    rate = 0.5 / N * torch.tensor([4.0, 4.0, 1.0])  # at most, while draws are kept
    assert (draws.var(dim=(0, 1)) * torch.tensor([4.0, 4.0, 1.0]) < 1.25 * (1 + rate)).all()
    assert (draws.var(dim=(0, 1)) * torch.tensor([4.0, 4.0, 1.0]) > 0.6).all()
    silent = draws_of(gaussian_target(), replace(plan, epochs=400, num_exploring=100, temperature=0.0), 3, start=3.0)
    assert silent.abs().max() < 1e-3


@pytest.mark.long
def test_minibatches_add_no_more_variance_than_is_said_and_much_of_it() -> None:
    """Over whole epochs the noise of shuffled batches cancels: chains that remember longer have less."""
    target = head_target(HeadLayout(1, 1, has_bias=False), 1000, labels=by_noisy_sign, prior=1.0)
    base = gaussian_at_mode(target)
    stiffness = float(base.covariance.unwhiten(torch.ones(1, 1, dtype=torch.float64))) ** -2
    plan = SghmcPlan(30, 1, 24, 6, 10, 0.02 * 1000 / stiffness, 0.5, is_cyclical=False)
    draws = sample_sghmc(target, plan, start=base.mean.expand(30, -1), generator=seeded()).draws
    by_length, by_batches = inflation(plan, stiffness, 1000, plan.learning_rate)
    assert by_batches == pytest.approx(0.02 * 99, rel=1e-6)
    found = float((draws.double() - base.mean).square().mean()) * stiffness
    assert 1 + 0.3 * by_batches < found < (1 + by_length) * (1 + 1.1 * by_batches)


@pytest.mark.parametrize("is_whitened", [False, True])
@pytest.mark.long
def test_logistic_moments_are_those_of_importance_weights(is_whitened: bool) -> None:
    target = head_target(HeadLayout(1, 2), 60, labels=by_noisy_sign, prior=0.5)
    base = gaussian_at_mode(target)
    noise = base.noise(20_000, seeded(5))
    theta, log_density = base.from_noise(noise)
    weights = (target.log_joint(theta) - log_density).softmax(dim=0)
    mean = weights @ theta
    whitening = whitening_by(base) if is_whitened else None
    stiffness = largest_curvature(target, base.mean, seeded(), whitening=whitening)
    plan = SghmcPlan(500, 1, 20, 150, ALL, 0.02 * 60 / stiffness, 0.2, is_cyclical=False)
    draws = draws_of(target, plan, 150, whitening=whitening)
    first = draws.mean(dim=1)
    error = first.std(dim=0) / math.sqrt(len(draws))
    spread = (weights @ (theta - mean).square()).sqrt()
    assert ((first.mean(dim=0) - mean).abs() < 4 * error + 0.02 * spread).all()
    found = (draws - mean).square().mean(dim=(0, 1)).sqrt()
    torch.testing.assert_close(found, spread, rtol=0.05, atol=0)


def test_the_stiffness_is_the_largest_eigenvalue() -> None:
    target = head_target(HeadLayout(3, 4), 50)
    base = gaussian_at_mode(target)
    product = target.hessian_operator(base.mean)
    hessian = product(torch.eye(15, dtype=torch.float64))
    assert largest_curvature(target, base.mean, seeded()) == pytest.approx(
        float(torch.linalg.eigvalsh(hessian)[-1]), rel=0.03
    )
    scale = preconditioner(mean_square(target, base.mean, 10, seeded())[0])
    assert scale.mean() == pytest.approx(1)
    scaled = scale.sqrt().unsqueeze(1) * hessian * scale.sqrt()
    expected = float(torch.linalg.eigvalsh(scaled)[-1])
    assert largest_curvature(target, base.mean, seeded(), scale) == pytest.approx(expected, rel=0.03)
    root = (
        torch.eye(15, dtype=torch.float64) + 0.3 * torch.randn(15, 15, generator=seeded(), dtype=torch.float64).tril()
    )
    expected = float(torch.linalg.eigvalsh(root.T @ hessian @ root)[-1])
    whitening = whitening_by(Gaussian(base.mean, Full(root), base.layout))
    found = largest_curvature(target, base.mean, seeded(), whitening=whitening)
    assert found == pytest.approx(expected, rel=0.03)


def test_a_preconditioner_that_stands_still_keeps_the_gaussian() -> None:
    plan = replace(PLAN, is_preconditioned=True, learning_rate=0.6, num_exploring=75)
    zeros = torch.zeros(400, 3, dtype=torch.float64)
    square = torch.tensor([1.0, 4.0, 0.25])
    draws = sample_sghmc(gaussian_target(), plan, start=zeros, generator=seeded(), square=square).draws.double()
    assert_variances(draws, torch.tensor([0.25, 0.25, 1.0], dtype=torch.float64) * 1.02)


class Stopping(SilentProgress):
    """A signal comes in this step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def task(self, name: str, total: int) -> Any:
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        self.left -= count
        if self.left <= 0:
            raise Interrupted(15, "as asked")


def test_a_resumed_run_has_the_same_draws() -> None:
    target = head_target(HeadLayout(3, 4), 40, dtype=torch.float32)
    plan = SghmcPlan(12, 2, 2, 3, 7, 0.1, 0.3)
    zeros = torch.zeros(3, 15)
    whole = sample_sghmc(target, plan, start=zeros, generator=seeded())
    store, states = MemoryDraws(), []
    with pytest.raises(Interrupted):
        sample_sghmc(
            target, plan, start=zeros, generator=seeded(), store=store,
            save=lambda state, is_last: states.append(state), progress=Stopping(45),
        )  # fmt: skip
    store._kept = store._kept[: len(states[-1]["num_steps"])]
    again = sample_sghmc(target, plan, start=zeros + 9, generator=seeded(8), store=store, state=states[-1])
    assert torch.equal(again.draws, whole.draws)
    assert torch.equal(again.history, whole.history)


def test_chains_that_fly_away_are_told_with_the_option_that_helps() -> None:
    plan = replace(PLAN, learning_rate=50.0)
    with pytest.raises(NumericError, match="diverged") as caught:
        draws_of(gaussian_target(), plan, 3, start=1.0)
    assert "learning_rate" in str(caught.value.hint)
