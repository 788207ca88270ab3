"""Quadrature and importance weights as integrators."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import mpmath as mp
import numpy as np
import pytest
import torch
from problems.heads import at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from scipy import integrate, special, stats
from torch import Tensor

from bnncli.errors import NumericError, UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import load_integrator, supports
from bnncli.integrators._partitions import DrawPartition
from bnncli.integrators.importance import WeightedMc, importance_weights
from bnncli.integrators.mc import DrawnMc
from bnncli.integrators.probit import binary_probit_probs
from bnncli.integrators.quadrature import binary_prediction, binary_probs
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.registry import load_class
from bnncli.targets.last_layer import LastLayerTarget


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


def test_probabilities_far_below_rounding_keep_their_digits() -> None:
    found = binary_probs(*vectors((-200.0, 20.0)))[0][0, 1]
    assert float(found) == pytest.approx(exact(-200.0, 20.0)[0], rel=1e-12, abs=0)  # 1e-23


def test_the_error_falls_exponentially_with_the_points() -> None:
    moments = vectors(*((m, s) for m in (0.0, 0.3, 5.0, 30.0) for s in (0.5, 1.499, 1.501, 7.0, 100.0)))
    best = binary_probs(*moments, points=1000)[0]
    errors = [(binary_probs(*moments, points=points)[0] / best - 1).abs().max() for points in (75, 100, 150, 250)]
    assert all(error < bound for error, bound in zip(errors, (4e-4, 1e-5, 2e-9, 2e-14), strict=True))
    assert errors[0] > 1e-5  # so that the bounds are about the rule and not about rounding


@pytest.mark.parametrize("rule", ["trapezoid", "gauss-hermite"])
def test_zero_variance_is_the_sigmoid_and_nothing_to_learn(rule: str) -> None:
    mean = torch.tensor([-800.0, -3.0, 0.0, 40.0], dtype=torch.float64)
    prediction = binary_prediction(mean, torch.zeros_like(mean), rule=rule)
    np.testing.assert_allclose(prediction.probs[:, 1], special.expit(mean.numpy()), rtol=1e-6)
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


BINARY = HeadLayout(1, 1)  # theta = (slope, intercept): small enough for a grid
LAYOUT = HeadLayout(3, 2)
make_target = partial(head_target, num_examples=12, labels=at_random_by(1), prior=0.3)


def laplace(target: LastLayerTarget, shift: float = 0.0) -> Gaussian:
    found = gaussian_at_mode(target)
    return replace(found, mean=found.mean + shift)


def ready(target: LastLayerTarget, posterior: Gaussian | Flow, num_samples: int = 4000, seed: int = 0) -> WeightedMc:
    integrator = load_integrator("importance")
    found = integrator.prepare(posterior, num_samples=num_samples, generator=seeded(seed), target=target)
    assert isinstance(found, WeightedMc)
    return found


def grid_probabilities(target: LastLayerTarget, features: Tensor) -> Tensor:
    """The exact probability of class 1, (N,), by a sum over a grid; the log posterior is written out here once more."""
    axis = torch.linspace(-10, 10, 401, dtype=torch.float64)
    theta = torch.cartesian_prod(axis, axis)
    sign = 2.0 * target.labels - 1
    logits = theta[:, :1] * target.features[:, 0] + theta[:, 1:]
    log_joint = torch.nn.functional.logsigmoid(sign * logits).sum(dim=1) - 0.15 * theta.square().sum(dim=1)
    return log_joint.softmax(dim=0) @ torch.sigmoid(theta[:, :1] * features[:, 0] + theta[:, 1:])


@pytest.mark.parametrize("kind", ["gaussian", "flow"])
def test_importance_corrects_a_wrong_gaussian(kind: str) -> None:
    target = make_target(BINARY)
    wrong = laplace(target, shift=0.4)
    posterior = wrong if kind == "gaussian" else Flow(wrong, (), "radial")
    features = torch.tensor([[-2.0], [0.3], [3.0]], dtype=torch.float64)
    exact = grid_probabilities(target, features)
    weighted = ready(target, posterior)
    assert weighted.warning is None
    assert weighted.pareto_k < 0.7
    found = weighted.predict(posterior, features).probs[:, 1].double()
    plain = load_integrator("mc").predict(posterior, features, num_samples=4000, generator=seeded()).probs[:, 1]
    drawn = weighted.drawn
    draws = torch.sigmoid(BINARY.logits(features, drawn.theta.double()))[:, :, 0]
    error = (drawn.weights.square() @ (draws - exact).square()).sqrt()  # of a self-normalised mean
    assert ((found - exact).abs() < 4 * error).all()
    assert ((plain.double() - exact).abs() > 8 * error).any()


def test_equal_weights_are_plain_mc() -> None:
    target = replace(make_target(LAYOUT), likelihood_scale=0.0)  # its posterior is the prior, a Gaussian
    prior = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).gaussian
    features = torch.randn(5, 2, generator=seeded(), dtype=torch.float64)
    found = ready(target, prior, 100)
    assert (found.drawn.weights, found.warning, math.isnan(found.pareto_k)) == (None, None, True)
    expected = load_integrator("mc").predict(prior, features, num_samples=100, generator=seeded())
    torch.testing.assert_close(vars(found.predict(prior, features)), vars(expected), rtol=0, atol=0)


def test_weights_enter_every_average() -> None:
    theta = 3 * torch.randn(40, LAYOUT.num_params, generator=seeded(), dtype=torch.float64)
    weights = torch.softmax(2 * torch.randn(40, generator=seeded(1), dtype=torch.float64), dim=0)
    features = torch.randn(9, 2, generator=seeded(2), dtype=torch.float64)
    found = DrawnMc(LAYOUT, theta, DrawPartition.of([40], weights), weights).predict(None, features)  # type: ignore[arg-type]
    probs = special.softmax(LAYOUT.logits(features, theta).numpy(), axis=2)
    mean = np.tensordot(weights.numpy(), probs, 1)
    entropy = special.entr(mean).sum(axis=1)
    np.testing.assert_allclose(found.probs, mean, atol=1e-6)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-6)
    np.testing.assert_allclose(
        found.mutual_info, entropy - weights.numpy() @ special.entr(probs).sum(axis=2), atol=1e-6
    )
    for n, interval in enumerate(np.asarray(found.interval)):
        draws = probs[:, n, mean[n].argmax()]
        shares = weights.numpy()[draws.argsort()]
        size = 1 / (weights**2).sum().item()  # effective draws, too few for 95 %
        assert size < 39
        expected = np.interp([0.5 / size, 1 - 0.5 / size], np.cumsum(shares) - shares / 2, np.sort(draws))
        np.testing.assert_allclose(interval, expected, atol=1e-6)


def test_weights_are_pareto_smoothed_and_sum_to_one() -> None:
    log_weights = -0.5 * torch.rand(1000, generator=seeded(), dtype=torch.float64).log()  # Pareto of shape 0.5
    weights, pareto_k, warning = importance_weights(log_weights + 5000)
    assert float(weights.sum()) == pytest.approx(1)
    assert warning is None
    assert pareto_k == pytest.approx(0.5, abs=0.25)
    raw = torch.softmax(log_weights, dim=0)
    body = log_weights.argsort()[:700]
    ratio = weights[body] / raw[body]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # smoothing changes the tail alone
    assert not torch.allclose(weights.sort().values[-5:] / ratio[0], raw.sort().values[-5:], rtol=1e-3)


def test_weights_that_cannot_be_trusted_leave_plain_mc_and_a_warning() -> None:
    target = make_target(LAYOUT, num_examples=200)
    far = laplace(target, shift=2.0)
    features = torch.randn(5, 2, generator=seeded(), dtype=torch.float64)
    found = ready(target, far, 200)
    assert found.pareto_k > 0.7
    assert "Pareto k" in str(found.warning)
    assert "equal weights" in str(found.warning)
    expected = load_integrator("mc").predict(far, features, num_samples=200, generator=seeded())
    torch.testing.assert_close(vars(found.predict(far, features)), vars(expected), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 24])
def test_too_few_draws_to_judge_the_weights_leave_plain_mc_and_a_warning(size: int) -> None:
    found = ready(make_target(LAYOUT), laplace(make_target(LAYOUT), shift=0.3), size)
    assert found.drawn.weights is None
    assert math.isnan(found.pareto_k)
    assert f"at least 25 draws, got {size}" in str(found.warning)


def test_without_a_target_there_are_no_weights() -> None:
    posterior = laplace(make_target(LAYOUT))
    with pytest.raises(UsageError, match="needs the features of the training split"):
        load_integrator("importance").predict(
            posterior, torch.zeros(1, 2, dtype=torch.float64), num_samples=30, generator=seeded()
        )


def test_weights_beyond_float64_leave_plain_mc_and_a_warning() -> None:
    spread = torch.linspace(0, 1, 200, dtype=torch.float64) ** 8 * 1e5  # the next is hundreds of nats behind the first
    infinite = torch.cat([torch.zeros(199, dtype=torch.float64), torch.tensor([-math.inf], dtype=torch.float64)])
    for log_weights, reason in ((spread, "outweigh all others"), (infinite, "1 of 200 log weights are not finite")):
        weights, pareto_k, warning = importance_weights(log_weights)
        assert weights is None
        assert math.isnan(pareto_k)
        assert reason in str(warning)
        assert "equal weights" in str(warning)


def test_a_posterior_that_is_not_finite_is_an_error_with_any_weights() -> None:
    posterior = laplace(make_target(LAYOUT), shift=math.inf)
    with pytest.raises(NumericError, match="class probabilities are not finite for"):
        ready(make_target(LAYOUT), posterior, 30).predict(posterior, torch.ones(2, 2, dtype=torch.float64))


def test_weighted_draws_are_not_kept() -> None:
    target = make_target(BINARY)
    posterior = laplace(target, shift=0.4)
    with pytest.raises(UsageError, match="\0keep_samples\0 needs draws with equal weights"):
        ready(target, posterior).probs_of_draws(posterior, torch.zeros(1, 1))
