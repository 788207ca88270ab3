"""Dirichlet distributions against torch and scipy, sampling, quadrature; the bridge against its inverse and published numbers."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor
from torch.distributions import Dirichlet

from bnncli.numerics import dirichlet

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


def test_mutual_information_of_a_huge_concentration_is_its_leading_term() -> None:
    log_alpha = log_concentration(10) + np.log(1e15)
    expected = 9 / (2 * log_alpha.exp().sum(dim=1))
    torch.testing.assert_close(dirichlet.mutual_information(log_alpha), expected, rtol=1e-4, atol=0)


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


def test_the_thesis_formula_of_its_appendix_fails_the_round_trip() -> None:
    log_alpha = log_concentration(10)
    mean, each = log_alpha - log_alpha.mean(dim=1, keepdim=True), (-log_alpha).exp()
    variance = each * (1 - 2 / 10) + each.mean(dim=1, keepdim=True) / 10
    wrong = (1 - 2 / 10 + (-mean).exp() * (-mean).exp().sum(dim=1, keepdim=True) / 100) / variance  # eq. (7.29)
    assert (wrong.log() - log_alpha).abs().max() > np.log(2)


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
