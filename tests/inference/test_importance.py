"""The ELBO and importance weights against closed forms."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from problems.heads import by_sign, head_target
from problems.seeds import seeded

from bnncli.flows.radial import Radial
from bnncli.inference import elbo as importance
from bnncli.inference.elbo import diagnose_importance, diagnose_weights, elbo, k_threshold, measure_gain, network_draws
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.structures.full import Full
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(1, 3)


def pareto_log_weights(shape: float, size: int, seed: int = 0) -> torch.Tensor:
    """Logs of Pareto weights of this shape; their mean is 1 / (1 - shape)."""
    return -shape * torch.rand(size, generator=seeded(seed), dtype=torch.float64).log()


def prior_target(prior_precision: float = 1.0) -> LastLayerTarget:
    """A target that is its prior: Gaussian, evidence 1."""
    features = torch.ones(4, 3, dtype=torch.float64)
    return LastLayerTarget(
        features, torch.zeros(4, dtype=torch.int64), LAYOUT, Prior(prior_precision), likelihood_scale=0.0
    )


def gaussian(precision: float) -> Gaussian:
    zeros = torch.zeros(LAYOUT.num_params, dtype=torch.float64)
    return Gaussian(
        zeros, Diag.from_hessian({"hessian.diag": zeros}, Prior(precision), LAYOUT), LAYOUT, Prior(precision)
    )


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_k_is_the_shape_of_pareto_weights(shape: float) -> None:
    size = 100_000
    tail = 3 * math.sqrt(size)
    shrunk = (tail * shape + 5) / (tail + 10)  # the fit's own prior
    found = diagnose_weights(pareto_log_weights(shape, size)).pareto_k
    assert found == pytest.approx(shrunk, abs=4 * (1 + shape) / math.sqrt(tail))


def test_a_draw_that_outweighs_all_others_leaves_no_tail_and_no_evidence() -> None:
    spread = torch.linspace(0, 1, 200, dtype=torch.float64) ** 8 * 1e5  # the next is hundreds of nats behind the first
    found = diagnose_weights(spread)
    assert (found.pareto_k, found.log_evidence, found.log_evidence_error) == (None, None, None)
    assert found.undefined == found.evidence_undefined
    assert "outweigh all others" in str(found.undefined)


def test_the_evidence_is_the_logarithm_of_the_mean_weight_within_its_error() -> None:
    scores = []
    for seed in range(40):
        found = diagnose_weights(pareto_log_weights(0.3, 2000, seed) - 5000)
        scores.append((found.log_evidence + 5000 + math.log(0.7)) / found.log_evidence_error)
    assert abs(sum(scores) / 40) < 4 / math.sqrt(40)
    assert 0.6 < torch.tensor(scores).square().mean().sqrt() < 1.5


def test_the_evidence_is_undefined_with_a_reason_above_the_threshold() -> None:
    found = diagnose_weights(pareto_log_weights(1.5, 2000))
    assert found.log_evidence is None
    assert found.log_evidence_error is None
    assert found.pareto_k > found.k_threshold
    assert "above 0.70" in str(found.evidence_undefined)


@pytest.mark.parametrize(("size", "expected"), [(100, 0.5), (1000, 2 / 3), (8192, 0.7)])
def test_the_threshold_of_k_grows_with_the_draws_up_to_seven_tenths(size: int, expected: float) -> None:
    assert k_threshold(size) == pytest.approx(expected)


def test_a_wider_gaussian_has_its_kl_divergence_and_the_evidence_of_the_target() -> None:
    found = diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded(), num_draws=4000)
    kl = 0.5 * LAYOUT.num_params * (2.0 - 1 - math.log(2.0))  # q has variance 2
    assert found.elbo == pytest.approx(-kl, abs=4 * found.elbo_error)
    # log w = log 2 P/2 - |theta|^2 / 4 with |theta|^2 = 2 chi^2_P, of variance 2 P
    assert found.log_weight_sd == pytest.approx(math.sqrt(2 * LAYOUT.num_params) / 2, rel=0.1)
    assert found.pareto_k < 0.1  # the weights are bounded
    assert found.log_evidence == pytest.approx(0, abs=4 * found.log_evidence_error)


def test_a_narrower_gaussian_has_heavy_tails() -> None:
    # Weights exp(0.4 |z|^2) of z ~ N(0, I): P(w > t) falls like t^{-1 / 0.8}.
    found = diagnose_importance(prior_target(1.0), gaussian(5.0), generator=seeded(), num_draws=4000)
    assert found.pareto_k > 0.7
    assert found.log_evidence is None


def test_the_posterior_itself_has_equal_weights_and_the_evidence_without_error() -> None:
    found = diagnose_importance(prior_target(2.0), gaussian(2.0), generator=seeded())
    assert (found.num_draws, found.pareto_k) == (512, None)
    assert "equal" in str(found.undefined)
    assert found.log_evidence == pytest.approx(0, abs=1e-10)
    assert found.log_weight_sd == pytest.approx(0, abs=1e-10)


def test_draws_double_until_the_standard_error_suffices_or_the_cap_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    # Standard deviation 1.4 around an ELBO of -0.6 nats: 1 % needs more draws than are allowed.
    assert diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded()).num_draws == 8192
    monkeypatch.setattr(importance, "WANTED_SHARE", 0.06)
    found = diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded())
    assert found.num_draws in (1024, 2048)
    assert found.elbo is not None
    assert found.elbo_error <= 0.06 * abs(found.elbo)
    assert diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded(), num_draws=30).num_draws == 30


def test_no_draws_are_added_where_the_weights_spread_beyond_use() -> None:
    # q is sixteen times too wide: log weights are -(16^2 - 1) / 2 times a chi-squared of as many degrees as parameters.
    found = diagnose_importance(prior_target(1.0), gaussian(1 / 16**2), generator=seeded())
    assert found.num_draws == 512
    assert found.log_weight_sd == pytest.approx((16**2 - 1) * math.sqrt(LAYOUT.num_params / 2), rel=0.2)
    assert found.elbo_error > importance.WANTED_NATS


def test_a_first_look_ends_where_the_weights_are_far_and_else_the_usual_number_is_drawn() -> None:
    far = diagnose_importance(prior_target(1.0), gaussian(1 / 16**2), generator=seeded(), first_draws=32)
    assert (far.num_draws, far.k_threshold) == (32, pytest.approx(1 - 1 / math.log10(32)))
    near, usual = (
        diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded(), **first)
        for first in ({"first_draws": 32}, {})
    )
    assert near == usual
    # A precise look is no reason for fewer than the usual: k of few draws says nothing.
    exact = diagnose_importance(prior_target(2.0), gaussian(2.0), generator=seeded(), first_draws=32)
    assert exact.num_draws == 512


def test_few_or_infinite_weights_are_undefined_with_the_reason() -> None:
    few = diagnose_weights(torch.arange(9.0))
    assert (few.elbo, few.pareto_k, few.undefined) == (4.0, None, "needs at least 25 draws, got 9")
    bad = diagnose_weights(torch.tensor([0.0, -math.inf, 1.0]))
    assert (bad.elbo, bad.log_weight_sd, bad.undefined) == (None, None, "1 of 3 log weights are not finite")


def test_a_network_whose_passes_take_long_gets_fewer_draws_and_no_more() -> None:
    # 5,000 images of a LeNet-5, 200 of a ResNet-20, 400 texts of a small encoder, 10,000 images of a ResNet-20
    sizes = [(5_000, 8_838), (200, 379_978), (400, 1_195_346), (10_000, 379_978)]
    assert [network_draws(*size) for size in sizes] == [512, 452, 71, 64]
    found = diagnose_importance(prior_target(1.0), gaussian(0.5), generator=seeded(), first_draws=32, enough_draws=71)
    assert found.num_draws == 71


make_target = partial(head_target, HeadLayout(1, 1), 12, labels=by_sign, prior=0.3)


def log_evidence_on_a_grid(target: LastLayerTarget, gaussian: Gaussian) -> float:
    axis = torch.linspace(-12, 12, 401, dtype=torch.float64)
    theta = gaussian.mean + gaussian.covariance.unwhiten(torch.cartesian_prod(axis, axis))
    cell = 2 * math.log(24 / 400) + gaussian.covariance.log_det_scale()
    return float(target.log_joint(theta).logsumexp(dim=0)) + cell


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
