"""Samplers, ELBO, importance weights and refinement on a target that is none of ours: a banana, known from a grid."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from problems.own_targets import NOISE_SD, Banana, Pair
from problems.seeds import seeded
from torch import Tensor

from bnncli.inference.dynamics import DYNAMICS, WhitenedPotential, trajectory
from bnncli.inference.elbo import diagnose_importance, elbo, measure_gain
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.nuts import sample_nuts
from bnncli.inference.refine import fit_flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.targets.target import Target


def banana() -> Target:
    values = NOISE_SD * torch.randn(8, generator=seeded(), dtype=torch.float64)
    return Banana(values - values.mean() - 1)


def base(variance: float = 0.5) -> Gaussian:
    """A Gaussian of a structure that knows no layout, and without a prior."""
    mean = torch.tensor([-1.2, 0.0], dtype=torch.float64)
    return Gaussian(mean, Diag(variance * torch.ones_like(mean)), Pair())


@cache
def grid() -> tuple[Tensor, Tensor, float]:
    """Points (G, 2), the log joint there (G,) and the log of a cell's area."""
    first, second = (torch.linspace(*ends, 401, dtype=torch.float64) for ends in ((-7.0, 3.0), (-4.0, 4.0)))
    points = torch.cartesian_prod(first, second)
    return points, banana().log_joint(points), math.log(float((first[1] - first[0]) * (second[1] - second[0])))


def log_evidence() -> float:
    _, log_joint, log_cell = grid()
    return float(log_joint.logsumexp(dim=0)) + log_cell


def moments(theta: Tensor) -> Tensor:
    """a, b, a^2, b^2 and a b^2, (..., 5): the last is what no Gaussian of the same mean and covariance has."""
    a, b = theta.double().unbind(dim=-1)
    return torch.stack([a, b, a**2, b**2, a * b**2], dim=-1)


def assert_moments(groups: Tensor) -> None:
    """Moments of draws (G, T, 2) lie within 4 standard errors of the grid's, from the spread between groups."""
    points, log_joint, _ = grid()
    weights, values = log_joint.softmax(dim=0), moments(points)
    expected = weights @ values
    means = moments(groups).mean(dim=1)
    error = means.std(dim=0) / math.sqrt(len(means))
    assert ((means.mean(dim=0) - expected).abs() < 4 * error).all()
    assert (error < 0.3 * (weights @ (values - expected).square()).sqrt()).all()  # which would tell another density


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_chains_of_both_dynamics_sample_it(dynamics: str) -> None:
    target = banana()
    drawn = sample_hmc(
        target, mode=base().mean, covariance=base(0.3).covariance, generator=seeded(1), dynamics=dynamics,
        num_chains=120, num_warmup=30, num_draws=20,
    )  # fmt: skip
    assert_moments(drawn.draws)
    expected = torch.stack([target.log_joint(chain) for chain in drawn.draws])
    torch.testing.assert_close(drawn.log_joint, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_trajectories_of_both_dynamics_lose_energy_of_second_order(dynamics: str) -> None:
    potential = WhitenedPotential(banana(), base().mean, base().covariance)
    start = potential.state(torch.randn(40, 2, generator=seeded(2), dtype=torch.float64))
    momentum = torch.randn(40, 2, generator=seeded(3), dtype=torch.float64)

    def error(num_steps: int) -> Tensor:
        end, last = trajectory(
            potential, start, momentum, step_size=0.5 / num_steps, num_steps=num_steps, dynamics=dynamics
        )
        energies = [one.potential + 0.5 * p.square().sum(dim=1) for one, p in ((start, momentum), (end, last))]
        return (energies[1] - energies[0]).abs().mean()

    assert error(64) / error(32) == pytest.approx(0.25, rel=0.05)


def test_nuts_samples_it() -> None:
    drawn = sample_nuts(
        banana(), mode=base().mean, covariance=base(0.3).covariance, seed=1, num_chains=2, num_warmup=30, num_draws=80
    )
    assert_moments(drawn.draws.reshape(2 * 5, 16, 2))


def test_its_elbo_and_its_evidence_are_the_grids() -> None:
    points, log_joint, log_cell = grid()
    log_density = base().log_density(points)
    expected = float(((log_joint - log_density) * (log_density + log_cell).exp()).sum())
    found = elbo(banana(), base(), generator=seeded(), num_samples=4000)
    assert abs(found.value - expected) < 4 * found.standard_error
    told = diagnose_importance(banana(), base(2.0), generator=seeded(1), num_draws=4000)
    assert abs(told.log_evidence - log_evidence()) < 4 * told.log_evidence_error
    assert told.log_evidence_error < 0.1


@pytest.mark.parametrize("batch_size", [2, 8])
def test_refining_on_it_brings_the_elbo_near_the_evidence(batch_size: int) -> None:
    target = banana()
    fit = fit_flow(
        target, base(), generator=seeded(), flow="planar", length=3, epochs=100 * batch_size // 8,
        batch_size=batch_size, learning_rate=0.05, num_draws=4,
    )  # fmt: skip
    gain = measure_gain(target, base(), fit.posterior, generator=seeded(1), num_samples=512)
    assert gain.verdict == "helped"
    gap, before = log_evidence() - gain.after.value, log_evidence() - gain.before.value
    assert -4 * gain.after.standard_error < gap < 0.5 * before
