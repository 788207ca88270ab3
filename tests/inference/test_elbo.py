"""The ELBO against closed forms and a two-parameter posterior on a grid."""

import math
from functools import partial

import pytest
import torch
from problems.heads import by_sign, head_target
from problems.seeds import seeded

from bnncli.covariances.full import Full
from bnncli.flows.radial import Radial
from bnncli.inference import elbo as elbo_module
from bnncli.inference.elbo import elbo, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

make_target = partial(head_target, HeadLayout(1, 1), 12, labels=by_sign, prior=0.3)


def log_evidence_on_a_grid(target: LastLayerTarget, gaussian: Gaussian) -> float:
    axis = torch.linspace(-12, 12, 401, dtype=torch.float64)
    theta = gaussian.mean + gaussian.covariance.unwhiten(torch.cartesian_prod(axis, axis))
    cell = 2 * math.log(24 / 400) + gaussian.covariance.log_det_scale()
    return float(target.log_joint(theta).logsumexp(dim=0)) + cell


def test_a_gaussian_that_is_the_posterior_has_the_evidence_without_noise() -> None:
    target = make_target(likelihood_scale=0.0)
    fit = fit_gaussian(target, start=torch.ones(2))
    estimate = elbo(target, fit.gaussian, generator=seeded(), num_samples=50)
    assert estimate.value == pytest.approx(0, abs=1e-6)  # the prior alone: log 1
    assert estimate.log_weight_sd < 1e-6


class QuadraticTarget:
    """log p(D, theta) = constant - (theta - m)^T A (theta - m) / 2: its posterior is Gaussian, its evidence known."""

    def __init__(self, mean: torch.Tensor, precision: torch.Tensor, constant: float) -> None:
        self.mean, self.precision, self.constant = mean, precision, constant

    @property
    def log_evidence(self) -> float:
        log_det = float(torch.linalg.slogdet(self.precision)[1])
        return self.constant + 0.5 * (len(self.mean) * math.log(2 * math.pi) - log_det)

    def log_joint(self, theta: torch.Tensor) -> torch.Tensor:
        gap = theta.double() - self.mean
        return self.constant - 0.5 * ((gap @ self.precision) * gap).sum(dim=1)


def quadratic_target() -> tuple[QuadraticTarget, Gaussian]:
    """A Gaussian posterior over five parameters, as target and as posterior."""
    factor = torch.randn(5, 5, generator=seeded(), dtype=torch.float64)
    precision = factor @ factor.T + torch.eye(5, dtype=torch.float64)
    mean = torch.randn(5, generator=seeded(1), dtype=torch.float64)
    scale = torch.linalg.cholesky(torch.linalg.inv(precision))
    return QuadraticTarget(mean, precision, -7.25), Gaussian(mean, Full(scale), HeadLayout(1, 4), Prior(1.0))


def test_elbo_of_a_gaussian_posterior_is_its_log_evidence_at_every_draw() -> None:
    target, posterior = quadratic_target()
    estimate = elbo(target, posterior, generator=seeded(), num_samples=200)  # type: ignore[arg-type]
    assert estimate.value == pytest.approx(target.log_evidence, abs=1e-6)
    assert estimate.log_weight_sd < 1e-6


def test_gradient_of_the_elbo_vanishes_where_the_base_is_the_posterior() -> None:
    """The derivative for beta at the identity, draw by draw: its mean is zero, one draw's is not."""
    target, posterior = quadratic_target()
    noise = torch.randn(4000, 5, generator=seeded(2), dtype=torch.float64)
    layer = Radial(HeadLayout(1, 4), seeded())
    with torch.no_grad():
        layer.x0.copy_(0.7 * torch.ones(5))
        layer.raw_beta.copy_(layer.raw_alpha)  # beta is 0

    def estimates(shift: float) -> torch.Tensor:
        with torch.no_grad():
            layer.raw_beta.copy_(layer.raw_alpha + shift)
            theta, log_density = Flow(posterior, (layer.requires_grad_(False),), "radial", "whitened").from_noise(noise)
        return target.log_joint(theta) - log_density

    derivative = (estimates(1e-4) - estimates(-1e-4)) / 2e-4
    error = float(derivative.std()) / len(derivative) ** 0.5
    assert abs(float(derivative.mean())) < 4 * error
    assert float(derivative.std()) > 0.05


def test_elbo_is_below_the_evidence_by_the_kl_divergence() -> None:
    target = make_target()
    gaussian = fit_gaussian(target, start=torch.zeros(2)).gaussian
    log_evidence = log_evidence_on_a_grid(target, gaussian)
    estimate = elbo(target, gaussian, generator=seeded(), num_samples=20_000)
    importance = float(estimate.log_weights.logsumexp(dim=0)) - math.log(20_000)
    assert estimate.value < log_evidence - 4 * estimate.standard_error
    assert importance == pytest.approx(log_evidence, abs=0.05)


def test_standard_error_covers_the_truth() -> None:
    target = make_target()
    gaussian = fit_gaussian(target, start=torch.zeros(2)).gaussian
    reference = elbo(target, gaussian, generator=seeded(99), num_samples=200_000).value
    scores = []
    for seed in range(30):
        estimate = elbo(target, gaussian, generator=seeded(seed), num_samples=200)
        assert estimate.standard_error == pytest.approx(estimate.log_weight_sd / 200**0.5)
        scores.append((estimate.value - reference) / estimate.standard_error)
    assert 0.6 < torch.tensor(scores).square().mean() ** 0.5 < 1.5


def test_blocks_of_draws_do_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    gaussian = fit_gaussian(target, start=torch.zeros(2)).gaussian
    whole = elbo(target, gaussian, generator=seeded(), num_samples=50).log_weights
    sizes: list[int] = []
    from_noise = Gaussian.from_noise
    monkeypatch.setattr(Gaussian, "from_noise", lambda self, noise: sizes.append(len(noise)) or from_noise(self, noise))
    monkeypatch.setattr(elbo_module, "_MOST_AT_ONCE", 7)
    blocks = elbo(target, gaussian, generator=seeded(), num_samples=50).log_weights
    assert max(sizes) == 7
    torch.testing.assert_close(blocks, whole)


def test_few_long_draws_are_weighed_at_once() -> None:
    assert [elbo_module.weighed_at_once(size) for size in (10, 2**16, 2**17, 2**24)] == [64, 64, 32, 16]


def test_gain_is_paired_and_agrees_with_separate_estimates() -> None:
    target = make_target()
    before = fit_gaussian(target, start=torch.zeros(2)).gaussian
    layer = Radial(HeadLayout(1, 1), seeded()).requires_grad_(False)
    after = Flow(before, (layer,), "radial", "whitened")
    found = measure_gain(target, before, after, generator=seeded(), num_samples=4000)
    gain, error = found.value, found.standard_error
    first, second = (elbo(target, q, generator=seeded(1), num_samples=4000) for q in (before, after))
    separate = math.hypot(first.standard_error, second.standard_error)
    assert error < separate
    assert abs(gain - (second.value - first.value)) < 4 * math.hypot(error, separate)
