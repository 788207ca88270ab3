"""Random numbers by row, quasi-random points, and Dirichlet quantiles against scipy."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from problems.seeds import normal, seeded
from scipy import integrate, special, stats
from torch import Tensor
from torch.distributions import Dirichlet

from bnncli.errors import UsageError
from bnncli.numerics import dirichlet
from bnncli.numerics.random import (
    MOST_DIMENSIONS,
    balance_warning,
    quasi_normal,
    row_shifts,
    shifted_normal,
    uniform_points,
)

ROWS = normal(300, 5, seed=1)


def noise_of(rows: Tensor, points: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return shifted_normal(points, row_shifts(rows, points.shape[1]), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_is_standard_normal_and_independent_of_all_others(dtype: torch.dtype) -> None:
    found = noise_of(ROWS, uniform_points(normal(40, 3)), dtype).double()
    assert stats.kstest(found.flatten().numpy(), "norm").pvalue > 1e-3
    of_coordinates = torch.corrcoef(found.permute(1, 0, 2).flatten(1))[[0, 0, 1], [1, 2, 2]]
    assert of_coordinates.abs().max() < 4 / (40 * 300) ** 0.5
    for values in (found[:, 0], found[:, 1] ** 2 - 1, found[:, 1] * found[:, 2]):
        # A mean over rows and draws errs as if all were independent.
        assert values.mean().abs() < 4 * values.std() / (40 * 300) ** 0.5


def test_points_that_are_even_stay_even_for_every_row() -> None:
    """Of 64 Sobol points each coordinate has one in every 64th, and every pair of coordinates one in most cells of 8 x 8."""
    points = uniform_points(quasi_normal(64, 2, seeded()))
    cells = torch.special.ndtr(noise_of(ROWS, points))
    for row in range(0, 300, 30):
        for coordinate in range(2):
            assert (cells[:, coordinate, row] * 64).long().unique().numel() == 64
        assert ((cells[:, 0, row] * 8).long() * 8 + (cells[:, 1, row] * 8).long()).unique().numel() == 64


@pytest.mark.parametrize(
    "rows",
    [ROWS, ROWS.float(), ROWS.half(), (10 * ROWS).long(), ROWS.view(300, 5, 1), ROWS > 0, ROWS.bfloat16()],
    ids=lambda rows: f"{rows.dtype} {rows.ndim}",
)
def test_rows_of_any_type_have_shifts_of_their_own(rows: Tensor) -> None:
    shifts = row_shifts(rows, 4)
    assert (shifts.dtype, shifts.shape) == (torch.int32, (4, 300))
    assert torch.equal(row_shifts(rows[3:9], 4), shifts[:, 3:9])
    assert torch.equal(row_shifts(rows.flip(0), 6)[:4], shifts.flip(1))
    assert shifts.unique().numel() == 4 * len(rows.flatten(1).unique(dim=0))


def test_wide_rows_are_hashed_in_parts() -> None:
    wide = torch.zeros(2, (1 << 21) + 3)
    wide[1, -1] = 1
    assert not torch.equal(*row_shifts(wide, 3).T)
    assert torch.equal(row_shifts(wide[1:], 3)[:, 0], row_shifts(wide, 3)[:, 1])


def test_nothing_is_infinite() -> None:
    extremes = torch.tensor([[-(2**31), -1, 0, 2**31 - 1]], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        found = shifted_normal(extremes, torch.zeros(4, 1, dtype=torch.int32), torch.empty(0, dtype=dtype))
        assert bool(found.isfinite().all())
        assert found.abs().max() > 5
    assert uniform_points(torch.tensor([[-40.0, 40.0]], dtype=torch.float64)).tolist() == [[-(2**31), 2**31 - 1]]


@pytest.mark.parametrize("dim", [1, 10, 2000])
def test_each_of_64_equal_cells_of_every_coordinate_has_one_point(dim: int) -> None:
    cells = (64 * torch.special.ndtr(quasi_normal(64, dim, seeded()))).floor().long()
    assert torch.equal(cells.sort(dim=0).values, torch.arange(64).unsqueeze(1).expand(-1, dim))


def test_each_point_is_a_standard_normal() -> None:
    first = torch.stack([quasi_normal(3, 2, seeded(seed)) for seed in range(600)])
    error = 1 / math.sqrt(600)
    assert first.mean(dim=0).abs().max() < 4 * error
    assert (first.square().mean(dim=0) - 1).abs().max() < 4 * math.sqrt(2) * error
    assert (first[:, :, 0] * first[:, :, 1]).mean(dim=0).abs().max() < 4 * error


def test_the_error_of_a_smooth_mean_falls_faster_than_that_of_random_draws() -> None:
    direction = torch.tensor([0.8, 0.5, 0.3], dtype=torch.float64)
    exact = math.exp(0.5 * float(direction.square().sum()))

    def error(size: int) -> float:
        found = [float((quasi_normal(size, 3, seeded(seed)) @ direction).exp().mean()) for seed in range(60)]
        return math.sqrt(sum((value - exact) ** 2 for value in found) / 60)

    # Random draws: 1 / 8 of it. The ratio of two root mean squares of 60 has a standard error of about 13 %.
    assert error(2048) < 0.6 / 8 * error(32)


def test_no_point_lies_at_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    points = quasi_normal(4096, 50, seeded())
    assert torch.isfinite(points).all()
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(shape, dtype=torch.float64))
    monkeypatch.setattr("scipy.stats.qmc.Sobol.random", lambda self, n: torch.zeros(n, 2, dtype=torch.float64).numpy())
    assert torch.isfinite(quasi_normal(4, 2, seeded())).all()


def test_the_generator_decides_every_point() -> None:
    assert torch.equal(quasi_normal(8, 3, seeded(1)), quasi_normal(8, 3, seeded(1)))
    assert not torch.equal(quasi_normal(8, 3, seeded(1)), quasi_normal(8, 3, seeded(2)))


def test_more_dimensions_than_there_are_direction_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 21201 dimensions, but 21202 are needed") as caught:
        quasi_normal(2, MOST_DIMENSIONS + 1, seeded())
    assert caught.value.hint is not None
    assert "logit-mc" in caught.value.hint


def test_only_powers_of_two_are_balanced() -> None:
    assert [size for size in range(1, 40) if balance_warning(size) is None] == [1, 2, 4, 8, 16, 32]
    assert "use \0samples\0 16 or 32" in str(balance_warning(20))


SIZES = [2, 3, 10, 100]


def log_concentration(num_classes: int, *, count: int = 5, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(num_classes)
    return spread * torch.randn(count, num_classes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_classes", SIZES)
def test_moments_and_entropy_are_those_of_torch(num_classes: int) -> None:
    log_alpha = log_concentration(num_classes)
    oracle = Dirichlet(log_alpha.exp())
    torch.testing.assert_close(dirichlet.mean(log_alpha), oracle.mean)
    torch.testing.assert_close(dirichlet.variance(log_alpha), oracle.variance)
    torch.testing.assert_close(dirichlet.total_variance(log_alpha), oracle.variance.sum(dim=1))
    torch.testing.assert_close(dirichlet.entropy(log_alpha), oracle.entropy())


@pytest.mark.parametrize("num_classes", [2, 5])
def test_expected_entropy_and_mutual_information_are_those_of_draws(num_classes: int) -> None:
    log_alpha, num_draws = log_concentration(num_classes, count=1), 100_000
    alpha = log_alpha[0].exp().numpy()
    draws = np.random.default_rng(0).dirichlet(alpha, num_draws)
    entropies = stats.entropy(draws, axis=1)
    error = 4 * entropies.std() / np.sqrt(num_draws)
    assert dirichlet.expected_entropy(log_alpha).item() == pytest.approx(entropies.mean(), abs=error)
    total = stats.entropy(alpha)
    assert dirichlet.mutual_information(log_alpha).item() == pytest.approx(total - entropies.mean(), abs=error)


def test_mutual_information_of_a_beta_is_the_integral() -> None:
    def entropy_density(p: float) -> float:
        return float(stats.entropy([p, 1 - p]) * stats.beta.pdf(p, 2.5, 4))

    expected = stats.entropy([2.5, 4]) - integrate.quad(entropy_density, 0, 1)[0]
    log_alpha = torch.tensor([[2.5, 4.0]], dtype=torch.float64).log()
    assert dirichlet.mutual_information(log_alpha).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("alpha", [(6e3, 3e3), (8e3, 9e3), (2e4, 5e4, 11e3)])
def test_mutual_information_keeps_its_digits_where_the_series_takes_over(alpha: tuple[float, ...]) -> None:
    with mp.workdps(40):
        total = mp.fsum(alpha)
        shares = [mp.mpf(a) / total for a in alpha]
        of_mean = -mp.fsum(p * mp.log(p) for p in shares)
        mean = mp.digamma(total + 1) - mp.fsum(p * mp.digamma(a + 1) for p, a in zip(shares, alpha, strict=True))
        expected = float(of_mean - mean)
    found = dirichlet.mutual_information(torch.tensor([alpha], dtype=torch.float64).log())
    assert found.item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("num_classes", SIZES)
def test_quantiles_are_scipys(num_classes: int) -> None:
    log_alpha = log_concentration(num_classes)
    alpha, classes = log_alpha.exp().numpy(), torch.tensor([[0, 1]] * 5)
    log_a, log_b = dirichlet.beta_marginals(log_alpha, classes)
    oracle = stats.beta(alpha[:, :2], alpha.sum(axis=1, keepdims=True) - alpha[:, :2])
    for level in (0.025, 0.5, 0.9):
        np.testing.assert_allclose(dirichlet.beta_quantile(log_a, log_b, level), oracle.ppf(level), rtol=1e-7)
    got = dirichlet.interval(log_alpha, classes[:, 1], level=0.8)
    np.testing.assert_allclose(got, np.stack([oracle.ppf(0.1), oracle.ppf(0.9)], axis=2)[:, 1], rtol=1e-7)


def test_the_rest_of_a_sure_class_is_not_lost_to_rounding() -> None:
    log_alpha = torch.tensor([[60.0, 1.0, 2.0]], dtype=torch.float64)
    log_b = dirichlet.beta_marginals(log_alpha, torch.tensor([[0]]))[1]
    assert log_b.item() == pytest.approx(np.logaddexp(1, 2), rel=1e-12)


def test_the_rest_of_any_class_is_the_sum_of_the_others_beyond_what_exponentials_hold() -> None:
    logs = np.array([[900.0, 899.0, 1.0]])
    log_b = dirichlet.beta_marginals(torch.from_numpy(logs), torch.tensor([[0, 1, 2]]))[1]
    rest = [special.logsumexp(np.delete(logs, k, axis=1)) for k in range(3)]
    assert log_b[0].tolist() == pytest.approx(rest, rel=1e-14)


@pytest.mark.parametrize(
    "logs",
    [(40, 40), (69, -69), (2000, 1), (2000, 2000), (2000, 1999), (39, 36), (270, 160), (-2000, 3), (-2000, -2000)],
)
def test_quantiles_of_any_concentration_are_ordered_probabilities(logs: tuple[float, float]) -> None:
    a, b = (torch.tensor([log], dtype=torch.float64) for log in logs)
    low, high = dirichlet.central_interval(a, b)[0].tolist()
    assert 0 <= low <= high <= 1
    if min(logs) > 20:
        assert (low, high) == pytest.approx((special.expit(logs[0] - logs[1]),) * 2, abs=1e-6)


@pytest.mark.parametrize("ratio", [1.0, 30.0])
def test_large_quantiles_go_on_where_the_exact_ones_end(ratio: float) -> None:
    a, b = 1.01e8, 1.01e8 * ratio
    deviation = stats.beta.std(a, b)
    for level in (0.001, 0.025, 0.975):
        got = dirichlet.beta_quantile(torch.tensor([a]).double().log(), torch.tensor([b]).double().log(), level)
        assert got.item() == pytest.approx(special.betaincinv(a, b, level), abs=1e-3 * deviation)
        assert got.item() != pytest.approx(a / (a + b), abs=0.5 * deviation)


def test_merged_classes_are_the_sums_of_draws() -> None:
    log_alpha, num_draws = log_concentration(6, count=1, spread=1), 50_000
    merged = dirichlet.merge(log_alpha, [[4, 1], [0, 2]])
    draws = np.random.default_rng(1).dirichlet(log_alpha[0].exp().numpy(), num_draws)
    sums = np.stack([draws[:, 4] + draws[:, 1], draws[:, 0] + draws[:, 2], draws[:, 3], draws[:, 5]], axis=1)
    moments = zip(dirichlet.mean(merged)[0], dirichlet.variance(merged)[0], sums.T, strict=True)
    for mean, variance, draws_of_one in moments:
        assert abs(mean - draws_of_one.mean()) < 4 * (variance / num_draws) ** 0.5
        assert variance.item() == pytest.approx(draws_of_one.var(), rel=0.05)
    torch.testing.assert_close(merged.exp().sum(dim=1), log_alpha.exp().sum(dim=1))


@pytest.mark.parametrize("groups", [[[0, 1], [1]], [[3]], [[]], [[0, 0]], [[-1]]])
def test_groups_that_are_no_partition_are_refused(groups: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="expected disjoint, nonempty groups of classes 0 to 2"):
        dirichlet.merge(log_concentration(3), groups)


@pytest.mark.parametrize("num_classes", SIZES)
def test_gaussians_that_dirichlets_have_come_back_as_those_dirichlets(num_classes: int) -> None:
    """MacKay's Gaussian in the softmax basis, written out: Hobbhahn (2020), equations 2.5 and 2.6."""
    log_alpha = log_concentration(num_classes)
    for one in log_alpha:
        alpha, each = one.exp(), (-one).exp()
        mean = one - one.mean()
        covariance = each.diag() - (each[:, None] + each[None, :] - each.mean()) / num_classes
        torch.testing.assert_close(mean.sum(), torch.zeros_like(mean.sum()), rtol=0, atol=1e-10)
        row_sums = covariance.sum(dim=1)
        torch.testing.assert_close(row_sums, torch.zeros_like(mean), rtol=0, atol=1e-10 * float(each.max()))
        precision = alpha.diag() - torch.outer(alpha, alpha) / alpha.sum()
        # The pseudo-inverse, by its definition on the sum-zero space: both annihilate the ones vector.
        projection = torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes
        torch.testing.assert_close(covariance @ precision, projection, rtol=0, atol=1e-9 * float(each.max()))
        got = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None])[0]
        torch.testing.assert_close(got, one, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("mean", "variance", "expected"),
    [
        ((2, -1, -1), (1, 1, 1), (4.90790, 0.56109, 0.56109)),
        ((3, -2, -1), (1, 1, 1), (23.00126, 0.48607, 0.74851)),
        ((1, 1, -2), (1, 2, 0.5), (2.78728, 1.39364, 0.91102)),
        ((0, 0, 0), (0.1, 0.1, 0.1), (6.66667, 6.66667, 6.66667)),
    ],
)
def test_published_bridges(mean: tuple[float, ...], variance: tuple[float, ...], expected: tuple[float, ...]) -> None:
    got = dirichlet.from_gaussian(torch.tensor([mean]).double(), torch.tensor([variance]).double()).exp()
    np.testing.assert_allclose(got[0], expected, atol=6e-6)


def test_two_classes_are_a_beta_of_the_difference() -> None:
    mean, variance = torch.tensor([[1.3]]).double(), torch.tensor([[0.6]]).double()
    logits, halves = torch.cat([mean / 2, -mean / 2], dim=1), (variance / 4).expand(-1, 2)
    a, b = dirichlet.from_gaussian(logits, halves).exp()[0].tolist()
    assert (np.log(a / b), 1 / a + 1 / b) == pytest.approx((1.3, 0.6))
    assert (a, b) == pytest.approx(((np.exp(1.3) + 1) / 0.6, (np.exp(-1.3) + 1) / 0.6))


def test_scale_divides_the_concentration_and_a_common_offset_does_nothing() -> None:
    mean, variance = log_concentration(7), log_concentration(7, spread=0.4).exp()
    log_alpha = dirichlet.from_gaussian(mean, variance)
    torch.testing.assert_close(dirichlet.from_gaussian(mean, 9 * variance), log_alpha - np.log(9))
    torch.testing.assert_close(dirichlet.from_gaussian(mean + 5, variance), log_alpha)


@pytest.mark.parametrize(("mean", "variance"), [(3000.0, 1.0), (0.0, 0.0), (100.0, 1e-40), (10.0, 1e35)])
def test_extreme_gaussians_have_a_finite_dirichlet(mean: float, variance: float) -> None:
    logits = torch.tensor([[mean, 0.0, -mean]])
    log_alpha = dirichlet.from_gaussian(logits, torch.full((1, 3), variance))
    assert torch.isfinite(log_alpha.float()).all()
    assert torch.isfinite(dirichlet.interval(log_alpha, torch.tensor([0]))).all()
    assert torch.isfinite(dirichlet.mutual_information(log_alpha)).all()
