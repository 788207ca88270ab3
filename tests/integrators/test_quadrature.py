"""Quadrature of two classes against adaptive high-precision integrals, closed forms and the other integrators."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from bnncli.errors import UsageError
from bnncli.integrators import load_integrator, supports
from bnncli.integrators.probit import binary_probit_probs
from bnncli.integrators.quadrature import binary_prediction, binary_probs
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.registry import load_class


def exact(mean: float, scale: float) -> tuple[float, float, float]:
    """E sigma(f), for a mean of at most 0 small, and the expected Bernoulli entropy: by adaptive quadrature with 30 digits."""

    def entropy(f: mp.mpf) -> mp.mpf:
        return mp.log(1 + mp.exp(-abs(f))) + abs(f) / (1 + mp.exp(abs(f)))

    with mp.workdps(30):
        m, s = mp.mpf(mean), mp.mpf(scale)
        centre = -m / s  # where the sigmoid is steep
        places = [centre, *(centre + sign * width / s for sign in (-1, 1) for width in (5, 60)), s, s + 5, 0, -5, 5]
        edges = sorted({mp.mpf(-14), s + 14, *(place for place in places if -14 < place < s + 14)})
        probability = mp.quad(lambda z: mp.npdf(z) / (1 + mp.exp(-m - s * z)), edges)
        expected = mp.quad(lambda z: mp.npdf(z) * entropy(m + s * z), edges)
        return float(probability), float(1 - probability), float(expected)


def vectors(*cases: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and variances of (mean, standard deviation)."""
    means, scales = torch.tensor(cases, dtype=torch.float64).T
    return means, scales.square()


@pytest.mark.parametrize("scale", [0.01, 1.499, 1.501, 100.0])
@pytest.mark.parametrize("mean", [-50.0, -0.7, 0.0])
def test_trapezoid_is_exact_to_rounding_on_both_sides(mean: float, scale: float) -> None:
    p, q, expected_entropy = exact(mean, scale)
    probs, entropy = binary_probs(*vectors((mean, scale), (-mean, scale)))
    np.testing.assert_allclose(probs, [[q, p], [p, q]], rtol=1e-13)
    assert entropy.numpy() == pytest.approx(expected_entropy, abs=1e-15, rel=1e-13)


def test_the_error_falls_exponentially_with_the_points() -> None:
    moments = vectors(*((m, s) for m in (0.0, 0.3, 5.0, 30.0) for s in (0.5, 1.499, 1.501, 7.0, 100.0)))
    best = binary_probs(*moments, points=1000)[0]
    errors = [(binary_probs(*moments, points=points)[0] / best - 1).abs().max() for points in (75, 100, 150, 250)]
    assert all(error < bound for error, bound in zip(errors, (4e-4, 1e-5, 2e-9, 2e-14), strict=True))
    assert errors[0] > 1e-5  # so that the bounds are about the rule and not about rounding


@pytest.mark.parametrize(("scale", "bound"), [(1.0, 1e-14), (4.0, 1e-9), (10.0, 1e-4), (100.0, 0.03)])
def test_gauss_hermite_loses_digits_as_the_logit_spreads(scale: float, bound: float) -> None:
    moments = vectors(*((m, scale) for m in np.linspace(-50, 50, 41)))
    error = (binary_probs(*moments, rule="gauss-hermite")[0] - binary_probs(*moments)[0]).abs().max()
    assert bound / 1e4 < error + 1e-16 < bound


def test_probabilities_are_symmetric_and_those_of_a_fair_coin_are_exact() -> None:
    mean, variance = vectors((0.0, 3.0), (2.0, 3.0), (-2.0, 3.0), (0.0, 0.0))
    probs, _ = binary_probs(mean, variance)
    assert torch.equal(probs[1], probs[2].flip(0))
    torch.testing.assert_close(probs[[0, 3]], torch.full((2, 2), 0.5, dtype=torch.float64), rtol=0, atol=1e-15)


def test_small_probabilities_obey_the_tilting_identity() -> None:
    mean, scale = -20.0, 3.0
    left = binary_probs(*vectors((mean, scale)))[0][0, 1].log()
    right = binary_probs(*vectors((-mean - scale**2, scale)))[0][0, 1].log()
    assert left.item() == pytest.approx(mean + scale**2 / 2 + right.item(), rel=1e-14)


@pytest.mark.parametrize("rule", ["trapezoid", "gauss-hermite"])
def test_zero_variance_is_the_sigmoid_and_nothing_to_learn(rule: str) -> None:
    mean = torch.tensor([-800.0, -3.0, 0.0, 40.0], dtype=torch.float64)
    prediction = binary_prediction(mean, torch.zeros_like(mean), rule=rule)
    np.testing.assert_allclose(prediction.probs[:, 1], special.expit(mean.numpy()), rtol=1e-6)
    assert prediction.mutual_info is not None
    assert prediction.interval is not None
    assert prediction.mutual_info.max() < 1e-7
    torch.testing.assert_close(prediction.interval, prediction.probs.amax(dim=1, keepdim=True).expand(-1, 2))


def test_huge_moments_stay_finite() -> None:
    prediction = binary_prediction(*vectors((1e4, 1e3), (-1e6, 1e-3), (3.0, 1e8), (0.0, 1e150)))
    assert torch.isfinite(prediction.probs).all()
    np.testing.assert_allclose(prediction.probs[2:, 1], 0.5, atol=1e-6)


def test_mutual_information_and_interval_are_those_of_draws() -> None:
    moments = vectors((1.0, 2.0), (-0.5, 0.8), (4.0, 6.0))
    prediction = binary_prediction(*moments)
    draws = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    for row, (mean, variance) in enumerate(zip(*moments, strict=True)):
        p = special.expit(mean.item() + math.sqrt(variance) * draws)
        average = p.mean()
        information = stats.entropy([average, 1 - average]) - (special.entr(p) + special.entr(1 - p)).mean()
        interval = np.quantile(p if average > 0.5 else 1 - p, [0.025, 0.975])
        assert prediction.mutual_info is not None
        assert prediction.interval is not None
        assert prediction.mutual_info[row].item() == pytest.approx(information, abs=1e-6)
        np.testing.assert_allclose(prediction.interval[row], interval, atol=2e-5)


def gaussian(layout: HeadLayout, *, seed: int = 0) -> Gaussian:
    """A posterior with correlated parameters."""
    generator = torch.Generator().manual_seed(seed)
    size = layout.num_params
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    scale = torch.randn(size, size, generator=generator, dtype=torch.float64).tril(-1) + torch.eye(size)
    return Gaussian(mean, load_class("covariances", "full")(scale), layout, Prior(1.0))


def test_two_logits_are_integrated_over_the_plane() -> None:
    layout = HeadLayout(2, 2)
    posterior, features = gaussian(layout), torch.tensor([[0.3, -1.0]], dtype=torch.float64)
    mean, covariance = (part[0].numpy() for part in posterior.logit_moments(features))
    (p, q), (_, r) = np.linalg.inv(covariance).tolist()
    scale = 1 / (2 * math.pi * math.sqrt(np.linalg.det(covariance)))

    def weighted(b: float, a: float) -> float:
        x, y = a - float(mean[0]), b - float(mean[1])
        return scale * math.exp(-(p * x * x + 2 * q * x * y + r * y * y) / 2) / (1 + math.exp(a - b))

    spread = 9 * np.sqrt(covariance.diagonal())
    expected, _ = integrate.dblquad(
        weighted,
        mean[0] - spread[0], mean[0] + spread[0], mean[1] - spread[1], mean[1] + spread[1], epsabs=1e-8,
    )  # fmt: skip
    found = load_integrator("quadrature").predict(posterior, features, num_samples=None, generator=torch.Generator())
    assert found.probs[0, 1].item() == pytest.approx(expected, abs=2e-7)


def test_a_point_predicts_as_its_sigmoid() -> None:
    layout = HeadLayout(1, 2)
    point = Point(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), layout)
    features = torch.tensor([[1.0, 1.0], [3.0, 0.0]])
    found = load_integrator("quadrature").predict(point, features, num_samples=None, generator=torch.Generator())
    np.testing.assert_allclose(found.probs[:, 1], special.expit([-0.5, 3.5]), rtol=1e-6)


def test_three_classes_are_refused_with_the_integrators_that_can() -> None:
    posterior = gaussian(HeadLayout(3, 2))
    assert not supports("quadrature", posterior)
    assert supports("quadrature", gaussian(HeadLayout(2, 2)))
    with pytest.raises(UsageError, match="quadrature supports at most 2 classes, but the posterior has 3") as caught:
        load_integrator("quadrature").predict(
            posterior, torch.zeros(1, 2), num_samples=None, generator=torch.Generator()
        )
    assert caught.value.code == "unsupported_integrator"
    assert caught.value.hint is not None
    assert "probit" in caught.value.hint
    assert "quadrature" not in caught.value.hint


@pytest.mark.parametrize(("settings", "why"), [({"rule": "simpson"}, "one of trapezoid, gauss-hermite; got 'simpson'"), ({"points": 7}, "8 to 1000; got 7")])  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load_integrator("quadrature", **settings)


@pytest.mark.parametrize(("extent", "largest"), [(5, 0.0113), (10, 0.0160), (20, 0.0172)])
def test_the_probit_formula_errs_as_much_as_is_known(extent: int, largest: float) -> None:
    mean, scale = np.meshgrid(np.linspace(0, extent, 101), np.linspace(0, extent, 101))
    mean, variance = torch.tensor(mean.ravel()), torch.tensor(scale.ravel() ** 2)
    approximate = binary_probit_probs(mean[:, None], variance[:, None])
    error = (approximate - binary_probs(mean, variance)[0]).abs().max().item()
    assert error == pytest.approx(largest, abs=6e-5)
