"""Distances between draws of two posteriors: maximum mean discrepancy and weight-space scores."""

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
from scipy.spatial.distance import pdist
from scipy.stats import norm, wasserstein_distance
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import distances as distances_module
from bnncli.evaluation.distances import (
    GAUSSIAN_WASSERSTEIN,
    ThinnedDraws,
    WeightDraws,
    _draw_labels,
    compare_draws,
    covariance_error,
    covariance_floor,
    mean_error,
    mean_floor,
    median_bandwidth,
    mmd2,
    num_distance_draws,
    num_draws_to_compare,
    permutation_p_value,
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
    monkeypatch.setattr(distances_module, "_BLOCK", 360)
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
    assert distances_module._squared_trace(torch.from_numpy(products)) == pytest.approx(expected, rel=1e-10)
    shifted = x + 5
    assert distances_module._squared_trace(shifted @ shifted.T) == pytest.approx(expected, rel=1e-8)


def test_long_draws_are_compared_by_fewer() -> None:
    assert [num_draws_to_compare(size) for size in (10, 2**25 // 600, 2**18, 2**24)] == [600, 600, 128, 50]


def test_both_estimates_are_those_of_the_loop() -> None:
    x, y, bandwidth = normal(5, 3), normal(4, 3, seed=1) + 0.5, 1.7

    def mean_kernel(a: Tensor, b: Tensor, *, skip_same: bool) -> float:
        pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if not (skip_same and i == j)]
        kernels = [math.exp(-float(((a[i] - b[j]) ** 2).sum()) / bandwidth**2) for i, j in pairs]
        return float(np.mean(kernels))

    cross = 2 * mean_kernel(x, y, skip_same=False)
    result = mmd2(x, y, bandwidth)
    for value, skip_same in ((result.unbiased, True), (result.biased, False)):
        own = mean_kernel(x, x, skip_same=skip_same) + mean_kernel(y, y, skip_same=skip_same)
        assert value == pytest.approx(own - cross, rel=1e-10)


def test_the_kernel_is_that_of_scikit_learn_at_gamma_one_over_bandwidth_squared() -> None:
    x, y, bandwidth = normal(30, 8), normal(20, 8, seed=1) * 1.2, 3.0
    own, other, cross = (rbf_kernel(a, b, gamma=bandwidth**-2).mean() for a, b in ((x, x), (y, y), (x, y)))
    assert mmd2(x, y, bandwidth).biased == pytest.approx(own + other - 2 * cross, rel=1e-10)


def test_blocks_of_parameters_do_not_change_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normal(6, 11), normal(6, 11, seed=1)
    whole = mmd2(x, y, 4.0)
    monkeypatch.setattr(distances_module, "_BLOCK", 18)
    assert mmd2(x, y, 4.0).biased == pytest.approx(whole.biased, rel=1e-12)


def test_equal_distributions_sit_at_the_floor_of_the_biased_estimate() -> None:
    count, dim = 300, 500
    x, y = normal(count, dim), normal(count, dim, seed=1)
    result = mmd2(x, y, median_bandwidth(y))
    # Distances concentrate at the median, so every kernel value is close to exp(-1).
    assert result.biased - result.unbiased == pytest.approx(2 / count * (1 - math.exp(-1)), rel=0.01)
    # What does not cancel in a kernel value is exp(-1) x.y / dim, of deviation exp(-1) / sqrt(dim).
    standard_error = math.sqrt(8) * math.exp(-1) / math.sqrt(dim) / count
    assert abs(result.unbiased) < 4 * standard_error


@pytest.mark.parametrize(("n", "m"), [(9, 9), (7, 12), (3, 4)])
def test_the_standard_error_is_the_jackknife_of_a_loop(n: int, m: int) -> None:
    x, y = normal(n, 3), normal(m, 3, seed=1) + 0.3
    variance = 0.0
    for count, without in (
        (n, [mmd2(torch.cat([x[:i], x[i + 1 :]]), y, 1.5).unbiased for i in range(n)]),
        (m, [mmd2(x, torch.cat([y[:i], y[i + 1 :]]), 1.5).unbiased for i in range(m)]),
    ):
        variance += (count - 1) * float(np.var(without))
    assert mmd2(x, y, 1.5).standard_error == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert mmd2(x[:2], y, 1.5).standard_error is None


@pytest.mark.parametrize(("shift", "most"), [(0.3, 1.25), (0.0, 1.8)])
def test_the_standard_error_is_the_spread_of_the_estimate_or_more(shift: float, most: float) -> None:
    found = [mmd2(normal(60, 5, seed=2 * i) + shift, normal(60, 5, seed=2 * i + 1), 3.0) for i in range(200)]
    spread = float(np.std([result.unbiased for result in found]))
    stated = math.sqrt(np.mean([result.standard_error**2 for result in found]))
    assert 0.8 * spread < stated < most * spread  # the spread of 200 has a standard error of 5 %


def test_the_published_bandwidth_is_the_median_over_the_first_50_of_both() -> None:
    x, y = normal(80, 6) + 1, normal(70, 6, seed=1)
    expected = np.median(pdist(np.concatenate([y[:50], x[:50]])))
    assert published_bandwidth(x, y) == pytest.approx(expected, rel=1e-12)


def test_a_common_offset_costs_no_digits() -> None:
    x, y = normal(20, 4), normal(25, 4, seed=1) + 1
    offset = 2.0**22  # exactly representable, so x + offset loses 22 bits and no more
    x, y = ((draws * 2**20).round() / 2**20 for draws in (x, y))
    assert mmd2(x + offset, y + offset, 2.0).biased == pytest.approx(mmd2(x, y, 2.0).biased, rel=1e-9)
    assert median_bandwidth(x + offset) == pytest.approx(median_bandwidth(x), rel=1e-12)


@pytest.mark.parametrize("count", [4, 7, 40])
def test_the_bandwidth_is_the_median_distance_between_different_draws(count: int) -> None:
    draws = normal(count, 6)
    assert median_bandwidth(draws.float()) == pytest.approx(np.median(pdist(draws.float().double())), rel=1e-12)


@pytest.mark.parametrize("num_others", [0, 2])
def test_coinciding_reference_draws_have_no_bandwidth(num_others: int) -> None:
    draws = torch.cat([normal(num_others, 301), normal(1, 301, seed=1).expand(9, -1)])
    with pytest.raises(DataError, match="their median distance is 0"):
        median_bandwidth(draws)


@pytest.mark.parametrize(
    ("count", "value", "bandwidth", "message"),
    [
        (1, 0.0, 1.0, "at least two draws per side, got 1 and 5"),
        (3, math.nan, 1.0, "expected finite draws"),
        (3, 0.0, 0.0, "expected a positive bandwidth, got 0.0"),
    ],
)
def test_draws_that_cannot_be_compared_are_refused(count: int, value: float, bandwidth: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mmd2(torch.full((count, 2), value), normal(5, 2), bandwidth)
    with pytest.raises(DataError, match="at least two draws, got 1"):
        median_bandwidth(normal(1, 2))


@pytest.mark.parametrize(("chains", "steps"), [(64, 40), (3, 200), (4, 500), (2000, 2)])
def test_thinning_takes_equal_shares_of_every_chain_and_spreads_them(chains: int, steps: int) -> None:
    index = torch.cartesian_prod(torch.arange(chains), torch.arange(steps)).reshape(chains, steps, 2)
    kept = thin(index, 600)
    assert len(kept.unique(dim=0)) == 600
    shares = torch.bincount(kept[:, 0], minlength=chains)
    assert shares.max() - shares.min() <= 1
    gaps = kept[:, 0].mul(steps).add(kept[:, 1]).diff()
    assert gaps.max() - gaps.min() <= 1


def test_thinning_keeps_all_draws_when_there_are_few() -> None:
    draws = normal(3, 5, 2)
    assert torch.equal(thin(draws, 15), draws.flatten(0, 1))


@pytest.mark.parametrize(("n", "m"), [(9, 9), (7, 12)])
def test_the_p_value_is_that_of_a_loop_over_permutations(n: int, m: int) -> None:
    x, y = normal(n, 3), normal(m, 3, seed=1) + 0.3
    seen, pooled = mmd2(x, y, 1.5).unbiased, torch.cat([x, y])
    order = torch.rand(60, n + m, generator=seeded(5)).argsort(dim=1)
    permuted = [mmd2(pooled[row < n], pooled[row >= n], 1.5).unbiased for row in order]
    expected = (1 + sum(value >= seen for value in permuted)) / 61
    found = permutation_p_value(x, y, 1.5, generator=seeded(5), num_permutations=60)
    assert 2 / 61 < expected < 1  # else nothing is compared
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(600, 600), (300, 7)])
def test_draws_are_relabelled_by_the_order_of_random_numbers(n: int, m: int) -> None:
    numbers = torch.rand(200, n + m, generator=seeded(3))
    assert m < 600 or any(len(row.unique()) < n + m for row in numbers)  # ties, in the order of their places
    found = _draw_labels(200, n, m, generator=seeded(3))
    assert torch.equal(found, numbers.argsort(dim=1, stable=True) < n)
    assert set(found.sum(dim=1).tolist()) == {n}


def test_the_p_value_is_uniform_when_the_distributions_are_equal() -> None:
    values = []
    for seed in range(200):
        x, y = normal(20, 4, seed=2 * seed), normal(30, 4, seed=2 * seed + 1)
        values.append(permutation_p_value(x, y, 2.0, generator=seeded(seed), num_permutations=99))
    found = torch.tensor(values)
    for level in (0.1, 0.25, 0.5, 0.75):
        share = float((found <= level + 1e-9).double().mean())
        assert share == pytest.approx(level, abs=4 * (level * (1 - level) / 200) ** 0.5)


def test_shifted_or_wider_draws_are_told_apart() -> None:
    x, y = normal(100, 10), normal(100, 10, seed=1)
    bandwidth = median_bandwidth(y)
    for other in (x + 0.5, 1.5 * x):
        assert permutation_p_value(other, y, bandwidth, generator=seeded()) == pytest.approx(1 / 1000)


def test_sides_of_a_permutation_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="at least two draws per side"):
        permutation_p_value(normal(1, 2), normal(5, 2), 1.0, generator=seeded())
