"""Distances between posteriors, in weight space and to a reference."""

from __future__ import annotations

import json
import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from problems.seeds import normal, seeded
from scipy.integrate import quad
from scipy.stats import norm, wasserstein_distance
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import distances as weight_space
from bnncli.evaluation.distances import (
    GAUSSIAN_WASSERSTEIN,
    ThinnedDraws,
    WeightDraws,
    compare_draws,
    covariance_error,
    covariance_floor,
    mean_error,
    mean_floor,
    median_bandwidth,
    mmd2,
    num_distance_draws,
    published_bandwidth,
    reference_rows,
    reference_scale,
    squared_distances,
    thin,
    thin_draws,
    wasserstein_distances,
    wasserstein_floor,
)
from bnncli.evaluation.scores import distances


@pytest.mark.parametrize(("n", "m"), [(9, 9), (12, 8), (7, 31), (1, 5)])
def test_marginal_distances_are_those_of_scipy(n: int, m: int) -> None:
    x, y = normal(n, 5).round(decimals=1), 2 * normal(m, 5, seed=1).round(decimals=1) + 0.3
    scale = reference_scale(y)
    np.testing.assert_allclose(scale, np.std(y.numpy(), axis=0, ddof=1), rtol=1e-12)
    expected = [wasserstein_distance(a, b) for a, b in zip(x.T.numpy(), y.T.numpy(), strict=True)]
    np.testing.assert_allclose(wasserstein_distances(x, y, scale), np.array(expected) / scale.numpy(), rtol=1e-10)


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


def normal_draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def rows_of(ours: WeightDraws | None, theirs: WeightDraws | None) -> dict[tuple[str, str], dict[str, Any]]:
    rows = reference_rows(ours, theirs, distances(), reference="hmc", generator=seeded())
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(row["reference"] == "hmc" and row["higher_is_better"] is False for row in rows)
    return {(row["name"], str(row.get("estimator", row.get("over")))): row for row in rows}


def test_the_three_discrepancies_differ_by_estimator_and_bandwidth_alone() -> None:
    hmc, draws = normal_draws(8, 100, 5), normal_draws(900, 5, seed=1) + 0.3
    found = rows_of(WeightDraws(draws), WeightDraws(hmc))
    x, y = thin(draws[None]), thin(hmc)
    own, published = mmd2(x, y, median_bandwidth(y)), mmd2(x, y, published_bandwidth(draws, hmc.flatten(0, 1)))
    assert found["mmd2", "unbiased"]["value"] == pytest.approx(own.unbiased, rel=1e-12)
    assert found["mmd2", "unbiased"]["standard_error"] == pytest.approx(own.standard_error, rel=1e-12)
    assert found["mmd2", "biased"]["value"] == pytest.approx(own.biased, rel=1e-12)
    assert found["mmd2", "published"]["value"] == pytest.approx(published.biased, rel=1e-12)
    assert found["mmd2", "biased"]["bandwidth"] == pytest.approx(own.bandwidth, rel=1e-12)
    assert found["mmd2", "published"]["bandwidth"] == pytest.approx(published.bandwidth, rel=1e-12) != own.bandwidth
    assert "differs by posterior" in found["mmd2", "published"]["bandwidth_rule"]
    assert all(row["n"] == [600, 600] and row["kernel"] == "rbf" for key, row in found.items() if key[0] == "mmd2")


def test_the_test_of_chains_goes_by_blocks_of_them() -> None:
    hmc, draws = normal_draws(8, 100, 5), normal_draws(900, 5, seed=1) + 0.1
    row = rows_of(WeightDraws(draws), WeightDraws(hmc, num_independent=90))["mmd2", "unbiased"]
    x, y = ThinnedDraws(thin(draws[None])), thin_draws(hmc, 90)
    distances = squared_distances(x.draws, y.draws)
    expected = compare_draws(x, y, distances, row["bandwidth"], generator=seeded())
    assert (row["value"], row["standard_error"]) == (expected.value, expected.standard_error)
    assert (row["p_value"], row["p_value_draws"], row["permutations"]) == (expected.p_value, [600, 600], 999)
    assert (row["blocks"], row["n"]) == (8, [600, 600])
    x = x.draws
    few = rows_of(WeightDraws(draws), WeightDraws(hmc, num_independent=9))
    assert few["mmd2", "unbiased"]["value"] == mmd2(x, thin(hmc), row["bandwidth"]).unbiased
    assert few["mmd2", "unbiased"]["standard_error"] is None
    assert few["mmd2", "unbiased"]["p_value"] is None
    assert (
        few["mmd2", "unbiased"]["p_value_undefined"]
        == few["covariance_error", "root of the unbiased square"]["undefined"]
    )


@pytest.mark.long  # in `.ci/run`; that of blocks is tested in test_draw_blocks.py
def test_chains_of_correlated_draws_do_not_move_the_unbiased_discrepancy() -> None:
    size, repeats, correlation = 5, 30, 0.95
    values, errors = [], []
    for seed in range(repeats):
        steps = normal_draws(8, 500, size, seed=seed).double() * math.sqrt(1 - correlation**2)
        steps[:, 0] /= math.sqrt(1 - correlation**2)
        for t in range(1, 500):
            steps[:, t] += correlation * steps[:, t - 1]
        num_independent = int(4000 * (1 - correlation) / (1 + correlation))
        row = rows_of(WeightDraws(normal_draws(600, size, seed=100 + seed)), WeightDraws(steps, num_independent))
        values.append(row["mmd2", "unbiased"]["value"])
        errors.append(row["mmd2", "unbiased"]["standard_error"])
    # Equal distributions: 0, where 600 draws with their correlation give about 0.004.
    spread = float(torch.tensor(values).std())
    assert abs(sum(values) / repeats) < 4 * spread / math.sqrt(repeats)
    assert spread < 1.3 * sum(errors) / repeats


def test_marginals_and_means_are_those_of_the_draws() -> None:
    hmc, draws = normal_draws(8, 100, 5), normal_draws(900, 5, seed=1) * 1.5 + 0.3
    found = rows_of(WeightDraws(draws), WeightDraws(hmc))
    scale = reference_scale(hmc.flatten(0, 1))
    distances = wasserstein_distances(draws, hmc.flatten(0, 1), scale)
    assert found["wasserstein", "mean"]["value"] == pytest.approx(float(distances.mean()), rel=1e-12)
    assert found["wasserstein", "largest"]["value"] == pytest.approx(float(distances.max()), rel=1e-12)
    row = found["mean_error", "root mean square"]
    expected = mean_error(draws.double().mean(dim=0), hmc.double().mean(dim=(0, 1)), scale)
    assert (row["value"], row["mean"]) == (pytest.approx(expected, rel=1e-12), "draws")
    assert row["noise_floor"] == pytest.approx(math.sqrt(1 / 900 + 1 / 800))
    # 1.25 for the covariance of 1.5 times the draws, up to noise.
    assert found["covariance_error", "root of the unbiased square"]["value"] == pytest.approx(1.25, abs=0.2)


def test_an_exact_mean_takes_the_place_of_the_draws_mean() -> None:
    hmc = normal_draws(8, 100, 5)
    row = rows_of(WeightDraws(normal_draws(900, 5, seed=1), mean=torch.full((5,), 3.0)), WeightDraws(hmc, 50))
    found = row["mean_error", "root mean square"]
    expected = mean_error(torch.full((5,), 3.0), hmc.double().mean(dim=(0, 1)), reference_scale(hmc.flatten(0, 1)))
    assert (found["value"], found["mean"]) == (pytest.approx(expected, rel=1e-12), "exact")
    assert found["noise_floor"] == pytest.approx(math.sqrt(1 / 50))


def test_a_point_is_compared_through_its_copies() -> None:
    found = rows_of(WeightDraws(torch.zeros(600, 200), mean=torch.zeros(200)), WeightDraws(normal_draws(6, 100, 200)))
    kernel_to_point, own = math.exp(-0.5), math.exp(-1)  # squared distances 200 and 400, median 400
    assert found["mmd2", "biased"]["value"] == pytest.approx(1 + own - 2 * kernel_to_point, abs=0.02)
    assert found["mmd2", "unbiased"]["value"] < found["mmd2", "biased"]["value"]
    assert found["mmd2", "unbiased"]["p_value"] == pytest.approx(0.001)
    assert found["covariance_error", "root of the unbiased square"]["value"] == pytest.approx(1, rel=1e-9)
    # The mean absolute value of a standard normal.
    assert found["wasserstein", "mean"]["value"] == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)


def test_a_point_beside_few_draws_lacks_the_published_bandwidth_alone() -> None:
    hmc = normal_draws(2, 10, 4)
    found = rows_of(WeightDraws(torch.zeros(600, 4), mean=torch.zeros(4)), WeightDraws(hmc))
    expected = mmd2(torch.zeros(600, 4), hmc.flatten(0, 1), median_bandwidth(hmc.flatten(0, 1)))
    assert found["mmd2", "unbiased"]["value"] == expected.unbiased
    assert found["mmd2", "biased"]["value"] == expected.biased
    row = found["mmd2", "published"]
    assert (row["value"], row["bandwidth"]) == (None, None)
    assert row["undefined"].startswith("half of the pairs of draws that set the bandwidth coincide")


def test_equal_distributions_stay_near_the_stated_noise() -> None:
    found = rows_of(WeightDraws(normal_draws(2000, 300, seed=1)), WeightDraws(normal_draws(4, 500, 300)))
    assert found["mmd2", "unbiased"]["p_value"] > 0.01
    assert abs(found["mmd2", "unbiased"]["value"]) < 4 * found["mmd2", "unbiased"]["standard_error"]
    for key in (("wasserstein", "mean"), ("mean_error", "root mean square")):
        assert found[key]["value"] == pytest.approx(found[key]["noise_floor"], rel=0.15)
    covariance = found["covariance_error", "root of the unbiased square"]
    assert covariance["value"] < 2 * covariance["noise_floor"]


@pytest.mark.parametrize(
    ("draws", "hmc", "reason"),
    [
        (normal_draws(9, 2), None, "no draws of hmc"),
        (None, normal_draws(2, 9, 2), "no draws of theta"),
        (normal_draws(2, 9, 2), normal_draws(2, 9, 2), "the draws are identical to the reference hmc"),
        (normal_draws(9, 3), normal_draws(2, 9, 2), "theta has 3 parameters, but the draws of hmc have 2"),
        (normal_draws(1, 2), normal_draws(2, 9, 2), "fewer than two draws"),
    ],
)
def test_what_cannot_be_compared_is_undefined(draws: Tensor | None, hmc: Tensor | None, reason: str) -> None:
    ours, theirs = (None if part is None else WeightDraws(part) for part in (draws, hmc))
    defined, undefined = (
        rows_of(WeightDraws(normal_draws(30, 2)), WeightDraws(normal_draws(3, 30, 2, seed=1))),
        rows_of(ours, theirs),
    )
    assert defined.keys() == undefined.keys()
    assert {(row["value"], row["undefined"]) for row in undefined.values()} == {(None, reason)}
    assert all(row["value"] is not None for row in defined.values())


def test_noise_that_is_unknown_is_not_stated() -> None:
    found = rows_of(WeightDraws(normal_draws(100, 3, seed=1)), WeightDraws(normal_draws(4, 30, 3), num_independent=0))
    for key in (("wasserstein", "mean"), ("mean_error", "root mean square")):
        assert found[key]["value"] > 0
        assert found[key]["noise_floor"] is None


def test_a_reference_that_stands_still_has_no_unit() -> None:
    hmc = normal_draws(4, 30, 3)
    hmc[:, :, 2] = 1
    found = rows_of(WeightDraws(normal_draws(100, 3, seed=1)), WeightDraws(hmc))
    assert found["mmd2", "unbiased"]["value"] is not None
    assert "parameter 2 does not vary in the reference's draws" in found["wasserstein", "mean"]["undefined"]
    stuck = rows_of(WeightDraws(normal_draws(100, 3, seed=1)), WeightDraws(torch.ones(4, 30, 3)))
    assert "median distance is 0" in stuck["mmd2", "biased"]["undefined"]


def test_many_parameters_are_measured_with_fewer_draws() -> None:
    assert [num_distance_draws(size) for size in (1, 850, 1200, 10**6)] == [1000, 1000, 2**20 // 1200, 600]


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
