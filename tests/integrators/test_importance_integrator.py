"""Importance-weighted prediction against a grid, naive weighted averages and plain mc."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from problems.heads import at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from scipy import special
from torch import Tensor

from bnncli.errors import NumericError, UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import load_integrator
from bnncli.integrators._partitions import DrawPartition
from bnncli.integrators.importance import WeightedMc, importance_weights
from bnncli.integrators.mc import DrawnMc
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

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
    assert drawn.weights is not None
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
    assert weights is not None
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
