"""Distances in weight space against scipy, brute force, exact Gaussians and the stated noise."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from problems.seeds import normal
from scipy.integrate import quad
from scipy.stats import norm, wasserstein_distance

from bnncli.errors import DataError
from bnncli.evaluation import distances as weight_space
from bnncli.evaluation.distances import (
    GAUSSIAN_WASSERSTEIN,
    covariance_error,
    covariance_floor,
    mean_error,
    mean_floor,
    reference_scale,
    wasserstein_distances,
    wasserstein_floor,
)


@pytest.mark.parametrize(("n", "m"), [(9, 9), (12, 8), (7, 31), (1, 5)])
def test_marginal_distances_are_those_of_scipy(n: int, m: int) -> None:
    x, y = normal(n, 5).round(decimals=1), 2 * normal(m, 5, seed=1).round(decimals=1) + 0.3
    scale = reference_scale(y)
    np.testing.assert_allclose(scale, np.std(y.numpy(), axis=0, ddof=1), rtol=1e-12)
    expected = [wasserstein_distance(a, b) for a, b in zip(x.T.numpy(), y.T.numpy(), strict=True)]
    np.testing.assert_allclose(wasserstein_distances(x, y, scale), np.array(expected) / scale.numpy(), rtol=1e-10)


def test_a_shift_moves_every_marginal_by_as_much() -> None:
    y = normal(40, 3)
    scale = reference_scale(y)
    np.testing.assert_allclose(wasserstein_distances(y + 2 * scale, y, scale), [2, 2, 2], rtol=1e-12)
    assert mean_error(y.mean(dim=0) + 2 * scale, y.mean(dim=0), scale) == pytest.approx(2, rel=1e-12)


def test_the_mean_error_is_the_root_mean_square_over_parameters() -> None:
    mean, other, scale = torch.tensor([1.0, 5.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]).double()
    assert mean_error(mean, other, scale) == pytest.approx(math.sqrt((1 + 4) / 2), rel=1e-12)


def test_the_squared_trace_is_the_sum_over_different_draws() -> None:
    x = normal(6, 3) + 1
    products = (x @ x.T).numpy()
    n = len(x)
    two = sum(products[i, j] ** 2 for i, j in permutations(range(n), 2)) / math.perm(n, 2)
    three = sum(products[i, j] * products[j, k] for i, j, k in permutations(range(n), 3)) / math.perm(n, 3)
    four = sum(products[i, j] * products[k, h] for i, j, k, h in permutations(range(n), 4)) / math.perm(n, 4)
    expected = two - 2 * three + four  # Li and Chen (2012), eq. (2.1)
    assert weight_space._squared_trace(torch.from_numpy(products)) == pytest.approx(expected, rel=1e-10)
    shifted = x + 5
    assert weight_space._squared_trace(shifted @ shifted.T) == pytest.approx(expected, rel=1e-8)


def test_the_covariance_error_finds_that_of_known_gaussians() -> None:
    dim, num_draws = 30, 1500
    root = 0.3 * normal(dim, dim, seed=5) + torch.eye(dim)
    x, y = normal(num_draws, dim) * 1.3, normal(num_draws, dim, seed=1) @ root
    exact = root.T @ root
    scale = exact.diagonal().sqrt()
    correlation, other = exact / scale / scale[:, None], 1.69 * torch.eye(dim) / scale.square()
    expected = float((other - correlation).norm() / correlation.norm())
    # The squared error has at most about covariance_floor^2 of noise; its root therefore at most that over its value.
    assert covariance_error(x, y, scale) == pytest.approx(
        expected, abs=2 * covariance_floor(1500, 1500) ** 2 / expected
    )


def test_a_point_has_all_of_the_covariance_wrong_and_equal_draws_none() -> None:
    y = normal(60, 20)
    scale = reference_scale(y)
    assert covariance_error(torch.ones(50, 20), y, scale) == pytest.approx(1, rel=1e-12)
    assert covariance_error(y.clone(), y, scale) == 0.0


def test_blocks_of_parameters_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = 1.5 * normal(40, 23), normal(50, 23, seed=1)

    def everything() -> list[float]:
        scale = reference_scale(y)
        return [*wasserstein_distances(x, y, scale).tolist(), covariance_error(x, y, scale), *scale.tolist()]

    whole = everything()
    monkeypatch.setattr(weight_space, "_BLOCK", 360)
    assert everything() == pytest.approx(whole, rel=1e-10)


def test_the_constant_of_the_wasserstein_floor_is_its_integral() -> None:
    integral = quad(lambda x: math.sqrt(norm.cdf(x) * norm.sf(x)), -12, 12, limit=500)[0]
    assert pytest.approx(math.sqrt(2 / math.pi) * integral, rel=1e-6) == GAUSSIAN_WASSERSTEIN


def test_equal_gaussians_sit_at_the_stated_noise() -> None:
    n, m, dim, repeats = 200, 100, 60, 40
    squares, distances, means = [], [], []
    for seed in range(repeats):
        x, y = normal(n, dim, seed=2 * seed), normal(m, dim, seed=2 * seed + 1)
        scale = torch.ones(dim).double()
        distances.append(float(wasserstein_distances(x, y, scale).mean()))
        means.append(mean_error(x.mean(dim=0), y.mean(dim=0), scale) ** 2)
        squares.append(covariance_error(x, y, scale))
    # 2,400 distances with a relative spread of about one half; sums of 2,400 squared normals.
    assert np.mean(distances) == pytest.approx(wasserstein_floor(n, m), rel=4 * 0.5 / math.sqrt(dim * repeats))
    assert np.mean(means) == pytest.approx(mean_floor(n, m) ** 2, rel=4 * math.sqrt(2 / (dim * repeats)))
    # Half of the squared estimates are cut at 0; the others have the spread of the floor's square.
    spread = math.sqrt(2 * np.mean(np.square(squares) ** 2))
    assert spread == pytest.approx(covariance_floor(n, m) ** 2, rel=0.5)


def test_what_has_no_scale_or_too_few_draws_is_refused() -> None:
    y = normal(10, 3)
    y[:, 1] = 4
    with pytest.raises(DataError, match="parameter 1 does not vary in the reference's draws"):
        reference_scale(y)
    with pytest.raises(DataError, match="needs at least two draws, got 1"):
        reference_scale(y[:1])
    with pytest.raises(DataError, match="needs at least 4 draws per side, got 3 and 10"):
        covariance_error(normal(3, 3), y, torch.ones(3).double())
