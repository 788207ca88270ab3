"""The permutation test of the squared mean discrepancy: against a loop, under the null, and for shifted draws."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import normal, seeded

from bnncli.errors import DataError
from bnncli.evaluation.distances import _relabelled, median_bandwidth, mmd2, permutation_p_value


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
    found = _relabelled(200, n, m, generator=seeded(3))
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


def test_the_same_draws_twice_show_no_difference() -> None:
    x = normal(20, 4)
    assert permutation_p_value(x, x.clone(), 2.0, generator=seeded()) == 1.0
    assert permutation_p_value(x.float(), x[:9], 2.0, generator=seeded()) > 0.01


def test_draws_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="at least two draws per side"):
        permutation_p_value(normal(1, 2), normal(5, 2), 1.0, generator=seeded())
