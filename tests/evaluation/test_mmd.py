"""The MMD test: its value, its permutations, and its rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems.seeds import normal, seeded
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import distances as mmd_module
from bnncli.evaluation.distances import (
    _draw_labels,
    median_bandwidth,
    mmd2,
    num_draws_to_compare,
    permutation_p_value,
    published_bandwidth,
    thin,
)


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
    monkeypatch.setattr(mmd_module, "_BLOCK", 18)
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
