"""Rows of the distances in weight space: what they say, for draws, exact means, points, and what cannot be compared."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor

from bnncli.evaluation.distances import (
    ThinnedDraws,
    WeightDraws,
    compare_draws,
    mean_error,
    median_bandwidth,
    mmd2,
    num_draws_for,
    published_bandwidth,
    reference_rows,
    reference_scale,
    squared_distances,
    thin,
    thin_draws,
    wasserstein_distances,
)
from bnncli.evaluation.scores import distances


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def rows_of(ours: WeightDraws | None, theirs: WeightDraws | None) -> dict[tuple[str, str], dict[str, Any]]:
    rows = reference_rows(ours, theirs, distances(), reference="hmc", generator=seeded())
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(row["reference"] == "hmc" and row["higher_is_better"] is False for row in rows)
    return {(row["name"], str(row.get("estimator", row.get("over")))): row for row in rows}


def test_the_three_discrepancies_differ_by_estimator_and_bandwidth_alone() -> None:
    hmc, draws = normal(8, 100, 5), normal(900, 5, seed=1) + 0.3
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
    hmc, draws = normal(8, 100, 5), normal(900, 5, seed=1) + 0.1
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
        steps = normal(8, 500, size, seed=seed).double() * math.sqrt(1 - correlation**2)
        steps[:, 0] /= math.sqrt(1 - correlation**2)
        for t in range(1, 500):
            steps[:, t] += correlation * steps[:, t - 1]
        num_independent = int(4000 * (1 - correlation) / (1 + correlation))
        row = rows_of(WeightDraws(normal(600, size, seed=100 + seed)), WeightDraws(steps, num_independent))
        values.append(row["mmd2", "unbiased"]["value"])
        errors.append(row["mmd2", "unbiased"]["standard_error"])
    # Equal distributions: 0, where 600 draws with their correlation give about 0.004.
    spread = float(torch.tensor(values).std())
    assert abs(sum(values) / repeats) < 4 * spread / math.sqrt(repeats)
    assert spread < 1.3 * sum(errors) / repeats


def test_marginals_and_means_are_those_of_the_draws() -> None:
    hmc, draws = normal(8, 100, 5), normal(900, 5, seed=1) * 1.5 + 0.3
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
    hmc = normal(8, 100, 5)
    row = rows_of(WeightDraws(normal(900, 5, seed=1), mean=torch.full((5,), 3.0)), WeightDraws(hmc, 50))
    found = row["mean_error", "root mean square"]
    expected = mean_error(torch.full((5,), 3.0), hmc.double().mean(dim=(0, 1)), reference_scale(hmc.flatten(0, 1)))
    assert (found["value"], found["mean"]) == (pytest.approx(expected, rel=1e-12), "exact")
    assert found["noise_floor"] == pytest.approx(math.sqrt(1 / 50))


def test_a_point_is_compared_through_its_copies() -> None:
    found = rows_of(WeightDraws(torch.zeros(600, 200), mean=torch.zeros(200)), WeightDraws(normal(6, 100, 200)))
    kernel_to_point, own = math.exp(-0.5), math.exp(-1)  # squared distances 200 and 400, median 400
    assert found["mmd2", "biased"]["value"] == pytest.approx(1 + own - 2 * kernel_to_point, abs=0.02)
    assert found["mmd2", "unbiased"]["value"] < found["mmd2", "biased"]["value"]
    assert found["mmd2", "unbiased"]["p_value"] == pytest.approx(0.001)
    assert found["covariance_error", "root of the unbiased square"]["value"] == pytest.approx(1, rel=1e-9)
    # The mean absolute value of a standard normal.
    assert found["wasserstein", "mean"]["value"] == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)


def test_a_point_beside_few_draws_lacks_the_published_bandwidth_alone() -> None:
    hmc = normal(2, 10, 4)
    found = rows_of(WeightDraws(torch.zeros(600, 4), mean=torch.zeros(4)), WeightDraws(hmc))
    expected = mmd2(torch.zeros(600, 4), hmc.flatten(0, 1), median_bandwidth(hmc.flatten(0, 1)))
    assert found["mmd2", "unbiased"]["value"] == expected.unbiased
    assert found["mmd2", "biased"]["value"] == expected.biased
    row = found["mmd2", "published"]
    assert (row["value"], row["bandwidth"]) == (None, None)
    assert row["undefined"].startswith("half of the pairs of draws that set the bandwidth coincide")


def test_equal_distributions_stay_near_the_stated_noise() -> None:
    found = rows_of(WeightDraws(normal(2000, 300, seed=1)), WeightDraws(normal(4, 500, 300)))
    assert found["mmd2", "unbiased"]["p_value"] > 0.01
    assert abs(found["mmd2", "unbiased"]["value"]) < 4 * found["mmd2", "unbiased"]["standard_error"]
    for key in (("wasserstein", "mean"), ("mean_error", "root mean square")):
        assert found[key]["value"] == pytest.approx(found[key]["noise_floor"], rel=0.15)
    covariance = found["covariance_error", "root of the unbiased square"]
    assert covariance["value"] < 2 * covariance["noise_floor"]


@pytest.mark.parametrize(
    ("draws", "hmc", "reason"),
    [
        (normal(9, 2), None, "no draws of hmc"),
        (None, normal(2, 9, 2), "no draws of theta"),
        (normal(2, 9, 2), normal(2, 9, 2), "the draws are identical to the reference hmc"),
        (normal(9, 3), normal(2, 9, 2), "theta has 3 parameters, but the draws of hmc have 2"),
        (normal(1, 2), normal(2, 9, 2), "fewer than two draws"),
    ],
)
def test_what_cannot_be_compared_is_undefined(draws: Tensor | None, hmc: Tensor | None, reason: str) -> None:
    ours, theirs = (None if part is None else WeightDraws(part) for part in (draws, hmc))
    defined, undefined = (
        rows_of(WeightDraws(normal(30, 2)), WeightDraws(normal(3, 30, 2, seed=1))),
        rows_of(ours, theirs),
    )
    assert defined.keys() == undefined.keys()
    assert {(row["value"], row["undefined"]) for row in undefined.values()} == {(None, reason)}
    assert all(row["value"] is not None for row in defined.values())


def test_noise_that_is_unknown_is_not_stated() -> None:
    found = rows_of(WeightDraws(normal(100, 3, seed=1)), WeightDraws(normal(4, 30, 3), num_independent=0))
    for key in (("wasserstein", "mean"), ("mean_error", "root mean square")):
        assert found[key]["value"] > 0
        assert found[key]["noise_floor"] is None


def test_a_reference_that_stands_still_has_no_unit() -> None:
    hmc = normal(4, 30, 3)
    hmc[:, :, 2] = 1
    found = rows_of(WeightDraws(normal(100, 3, seed=1)), WeightDraws(hmc))
    assert found["mmd2", "unbiased"]["value"] is not None
    assert "parameter 2 does not vary in the reference's draws" in found["wasserstein", "mean"]["undefined"]
    stuck = rows_of(WeightDraws(normal(100, 3, seed=1)), WeightDraws(torch.ones(4, 30, 3)))
    assert "median distance is 0" in stuck["mmd2", "biased"]["undefined"]


def test_many_parameters_are_measured_with_fewer_draws() -> None:
    assert [num_draws_for(size) for size in (1, 850, 1200, 10**6)] == [1000, 1000, 2**20 // 1200, 600]
