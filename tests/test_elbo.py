"""The ELBO against closed forms and a two-parameter posterior on a grid."""

import math

import pytest
import torch

from bnncli.flows.radial import Radial
from bnncli.inference import elbo as elbo_module
from bnncli.inference.elbo import elbo, elbo_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.layout import HeadLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_target(likelihood_scale: float = 1.0) -> LastLayerTarget:
    features = torch.randn(12, 1, generator=seeded(), dtype=torch.float64)
    labels = (features[:, 0] > 0).long()
    return LastLayerTarget(features, labels, HeadLayout(1, 1), Prior(0.3), likelihood_scale)


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
    monkeypatch.setattr(elbo_module, "_BLOCK_DRAWS", 7)
    blocks = elbo(target, gaussian, generator=seeded(), num_samples=50).log_weights
    torch.testing.assert_close(blocks, whole)


def test_gain_is_paired_and_agrees_with_separate_estimates() -> None:
    target = make_target()
    before = fit_gaussian(target, start=torch.zeros(2)).gaussian
    layer = Radial(HeadLayout(1, 1), seeded()).requires_grad_(False)
    after = Flow(before, (layer,), "radial", "whitened")
    gain, error = elbo_gain(target, before, after, generator=seeded(), num_samples=4000)
    first, second = (elbo(target, q, generator=seeded(1), num_samples=4000) for q in (before, after))
    separate = math.hypot(first.standard_error, second.standard_error)
    assert error < separate
    assert abs(gain - (second.value - first.value)) < 4 * math.hypot(error, separate)
