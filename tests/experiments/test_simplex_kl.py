"""Densities on the simplex: the points, shares of samples, the bridge's density, the crossing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from bnncli.experiments.simplex_kl import (
    GAUSSIANS,
    bridge_shares,
    crossing,
    divergence,
    projected,
    sample_shares,
    vertices,
)
from bnncli.numerics import dirichlet


def test_a_triangle_halved_five_times_has_561_vertices() -> None:
    points = vertices(5)
    assert points.shape == (561, 3)
    assert points.min() == 1e-3
    assert len(np.unique(points, axis=0)) == 561


def test_samples_count_at_their_nearest_vertex() -> None:
    mean, covariance = torch.tensor([2.0, 0.0, 1.0]).double(), 1e-12 * torch.eye(3).double()
    points = vertices(3)
    shares = sample_shares(mean, covariance, points, 50, torch.Generator().manual_seed(0))
    nearest = np.linalg.norm(points - mean.softmax(0).numpy(), axis=1).argmin()
    assert shares[nearest] == 1
    assert shares.sum() == 1


def test_the_bridge_has_the_density_of_its_dirichlet_at_the_vertices() -> None:
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in GAUSSIANS[1])
    points = vertices(3) / vertices(3).sum(axis=1, keepdims=True)
    alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None]).exp()[0].numpy()
    expected = np.array([stats.dirichlet.pdf(point, alpha) for point in points])
    np.testing.assert_allclose(bridge_shares(mean, covariance, points), expected / expected.sum(), rtol=1e-9)


def test_projected_moments_are_those_of_logits_minus_their_mean() -> None:
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in GAUSSIANS[2])
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((200_000,))
    centred = draws - draws.mean(dim=1, keepdim=True)
    found_mean, found_covariance = projected(mean, covariance)
    torch.testing.assert_close(centred.mean(dim=0), found_mean, atol=0.02, rtol=0)
    torch.testing.assert_close(centred.T.cov(), found_covariance, atol=0.03, rtol=0)


def test_divergence_is_zero_of_equal_shares_and_a_sum_by_hand_of_others() -> None:
    one, other = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.5, 0.25])
    assert divergence(one, one) == 0
    assert divergence(one, other) == pytest.approx(0.5 * np.log(2), abs=1e-12)


def test_a_power_law_crosses_its_level_where_it_should() -> None:
    sizes = [10, 100, 1000]
    assert crossing(sizes, [1 / size for size in sizes], 1 / 250) == pytest.approx(250)
    assert crossing(sizes, [0.1, 0.01, 0.001], 0.5) == 10
    assert crossing(sizes, [0.1, 0.01, 0.001], 1e-5) == 1000


def test_samples_have_the_covariance_that_was_asked_for() -> None:
    mean, covariance = torch.zeros(3).double(), torch.tensor(GAUSSIANS[2][1], dtype=torch.float64)
    points = vertices(5)
    shares = sample_shares(mean, covariance, points, 100_000, torch.Generator().manual_seed(0))
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((100_000,)).softmax(dim=1).numpy()
    np.testing.assert_allclose(shares @ points**2, (draws**2).mean(axis=0), atol=0.005)
