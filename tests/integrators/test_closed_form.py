"""Probit, mean-field and bridge: limits, invariances, exact cases and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems.heads import ONE, THREE, TWO
from problems.posteriors import Draws, Full, gaussian, inputs, predict
from scipy import special, stats
from torch import Tensor

from bnncli import integrators
from bnncli.errors import UsageError
from bnncli.integrators import Prediction, load_integrator
from bnncli.integrators.bridge import condition_on_zero_sum, shrink
from bnncli.integrators.probit import binary_probit_probs
from bnncli.numerics import dirichlet
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.registry import load_class


def predict_with(name: str, posterior: object, features: Tensor, **settings: object) -> Prediction:
    integrator = load_integrator(name, **settings)
    return integrator.predict(posterior, features, num_samples=None, generator=torch.Generator())


def with_common_offset(posterior: Full, *, scale: float = 3.0) -> Full:
    """The same posterior with one more random parameter vector added to every output."""
    layout, draws = posterior.layout, posterior.draws
    size = layout.num_features + layout.has_bias
    common = scale * torch.randn(size, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    extra = layout.flatten(common.unsqueeze(1).expand(-1, layout.num_outputs, -1)).T
    scale_factor = torch.cat([draws.scale, extra], dim=1)
    return Full(Draws(layout, draws.mean, scale_factor))


def binary_probit_of_the_difference(posterior: Full, features: Tensor) -> Tensor:
    mean, covariance = posterior.logit_moments(features)
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    p = torch.sigmoid((mean[:, 1] - mean[:, 0]) / torch.sqrt(1 + math.pi / 8 * variance))
    return torch.stack([1 - p, p], dim=1).float()


@pytest.mark.parametrize(
    ("name", "settings", "layout"),
    [
        ("quadrature", {}, TWO),
        ("mean-field", {"order": 2, "projection": "none"}, TWO),
        ("mean-field", {"order": 2}, HeadLayout(3, 4, has_bias=False)),
        ("bridge", {"projection": "conditional"}, HeadLayout(3, 4, has_bias=False)),
    ],
)
def test_what_all_logits_share_under_a_weak_prior_costs_no_digits(
    name: str, settings: dict[str, object], layout: HeadLayout
) -> None:
    features = inputs(layout).float()
    mean = torch.linspace(-0.5, 0.5, layout.num_params, dtype=torch.float64)

    def predict_under(common: float) -> Prediction:
        outputs = 0.2 * torch.eye(layout.num_outputs, dtype=torch.float64) + common
        root = torch.linalg.cholesky(torch.kron(outputs, torch.eye(layout.num_features, dtype=torch.float64)))
        posterior = Gaussian(mean, load_class("covariances", "full")(root), layout, Prior(1.0))
        return predict_with(name, posterior, features, **settings)

    expected, found = predict_under(0.0), predict_under(1e7)
    torch.testing.assert_close(found.probs, expected.probs, rtol=0, atol=1e-5)
    if expected.interval is not None:
        torch.testing.assert_close(found.interval, expected.interval, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("probit", {"projection": "difference"}), *[("mean-field", {"order": order}) for order in (0, 1, 2)]],
)
def test_of_two_classes_the_binary_probit_of_the_difference_is_left(name: str, settings: dict[str, object]) -> None:
    posterior, features = gaussian(TWO), inputs(TWO)
    expected = binary_probit_of_the_difference(posterior, features)
    torch.testing.assert_close(predict_with(name, posterior, features, **settings).probs, expected)


INVARIANT = [
    ("probit", {"projection": "sum-zero"}), ("mean-field", {"order": 2, "projection": "none"}),
    ("mean-field", {"order": 1}), ("mean-field", {}), ("bridge", {}), ("bridge", {"normalize": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "layout"),
    [
        *[(name, settings, layout) for name, settings in INVARIANT for layout in (TWO, THREE)],
        ("probit", {"projection": "difference"}, TWO),
    ],
    ids=str,
)
def test_an_uncertain_constant_added_to_all_logits_changes_nothing(
    name: str, settings: dict[str, object], layout: HeadLayout
) -> None:
    posterior, features = gaussian(layout), inputs(layout)
    before, after = (
        predict_with(name, one, features, **settings) for one in (posterior, with_common_offset(posterior))
    )
    torch.testing.assert_close(before.probs, after.probs)


@pytest.mark.parametrize(
    ("name", "settings"), [("probit", {}), ("mean-field", {"projection": "none"}), ("bridge", {"projection": "none"})]
)
def test_without_a_projection_it_does(name: str, settings: dict[str, object]) -> None:
    posterior, features = gaussian(THREE), inputs(THREE)
    before, after = (
        predict_with(name, one, features, **settings) for one in (posterior, with_common_offset(posterior))
    )
    assert (before.probs - after.probs).abs().max() > 0.01


@pytest.mark.parametrize(("name", "settings"), [("probit", {"projection": p}) for p in ("none", "sum-zero", "difference")] + [("mean-field", {"order": o}) for o in (0, 1, 2)])  # fmt: skip
def test_a_single_logit_is_the_binary_probit_whatever_the_setting(name: str, settings: dict[str, object]) -> None:
    posterior, features = gaussian(ONE), inputs(ONE)
    expected = binary_probit_probs(*posterior.logit_marginals(features)).float()
    torch.testing.assert_close(predict_with(name, posterior, features, **settings).probs, expected)


def test_projected_probit_of_two_logits_is_too_sure_by_the_known_factor() -> None:
    posterior, features = gaussian(TWO), inputs(TWO)
    mean, covariance = posterior.logit_moments(features)
    difference, variance = mean[:, 1] - mean[:, 0], covariance.sum(dim=(1, 2)) - 4 * covariance[:, 0, 1]
    expected = torch.sigmoid(difference / torch.sqrt(1 + math.pi / 32 * variance))
    got = predict_with("probit", posterior, features, projection="sum-zero").probs[:, 1]
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_mean_field_is_the_loop_over_pairs(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, features = gaussian(THREE, scale=2), inputs(THREE)
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", 3)
    got = predict_with("mean-field", posterior, features, order=order, projection="none").probs
    moments = (part.numpy() for part in posterior.logit_moments(features))
    for row, mean, covariance in zip(got, *moments, strict=True):
        p = np.zeros(3)
        for k in range(3):
            for i in range(3):
                v = (covariance[k, k], covariance[k, k] + covariance[i, i], covariance[k, k] + covariance[i, i] - 2 * covariance[k, i])  # fmt: skip
                if i != k:
                    p[k] += 1 / special.expit((mean[k] - mean[i]) / np.sqrt(1 + math.pi / 8 * v[order]))
        np.testing.assert_allclose(row, (1 / (2 - 3 + p)) / (1 / (2 - 3 + p)).sum(), atol=1e-6)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_mean_field_of_far_apart_logits_stays_finite(order: int) -> None:
    theta = torch.tensor([4000.0, -4000.0, 0.0])
    probs = predict_with(
        "mean-field", Point(theta, HeadLayout(3, 1, has_bias=False)), torch.ones(1, 1), order=order
    ).probs
    assert probs.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("order", [0, 1])
def test_projected_mean_field_is_that_of_the_logits_minus_their_mean(order: int) -> None:
    posterior, features = gaussian(THREE), inputs(THREE)
    # Weights without their mean over the outputs are a posterior of logits without their mean.
    projection = torch.eye(3, dtype=torch.float64) - 1 / 3
    factor, center = posterior.draws.scale.T, posterior.center
    scale, mean = (THREE.flatten(projection @ THREE.augment(part)) for part in (factor, center))
    projected = Full(Draws(THREE, mean, scale.T))
    torch.testing.assert_close(
        predict_with("mean-field", posterior, features, order=order).probs,
        predict_with("mean-field", projected, features, order=order, projection="none").probs,
    )


def exact_mean(mean: Tensor, covariance: Tensor, num_draws: int = 200_000) -> Tensor:
    factor = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(mean), dtype=mean.dtype))
    noise = torch.randn(num_draws, len(mean), generator=torch.Generator().manual_seed(7), dtype=mean.dtype)
    return (mean + noise @ factor.T).softmax(dim=1).mean(dim=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("probit", {}),
        ("probit", {"projection": "sum-zero"}),
        *[("mean-field", {"order": order}) for order in (0, 1, 2)],
    ],
)
def test_closed_forms_are_nearer_to_the_integral_than_the_plug_in(name: str, settings: dict[str, object]) -> None:
    posterior, features = gaussian(THREE, scale=1.0), inputs(THREE)
    exact = torch.stack([exact_mean(*moments) for moments in zip(*posterior.logit_moments(features), strict=True)])
    error, plain = (
        (predict_with(one, posterior, features, **values).probs - exact).abs().sum(dim=1).mean() / 2
        for one, values in ((name, settings), ("plug-in", {}))
    )
    assert error < plain - 0.005  # the standard error of 200,000 draws is below .0012 each


def test_the_bridge_is_the_dirichlet_of_the_projected_moments() -> None:
    posterior, features = gaussian(THREE), inputs(THREE)
    prediction = predict_with("bridge", posterior, features)
    mean, covariance = posterior.logit_moments(features)
    projection = torch.eye(3, dtype=torch.float64) - 1 / 3
    mean, variance = mean @ projection, (projection @ covariance @ projection).diagonal(dim1=1, dim2=2)
    alpha = (1 - 2 / 3 + mean.exp() * (-mean).exp().sum(dim=1, keepdim=True) / 9) / variance
    assert prediction.log_concentration is not None
    torch.testing.assert_close(prediction.log_concentration, alpha.log().float())
    torch.testing.assert_close(prediction.probs, (alpha / alpha.sum(dim=1, keepdim=True)).float())


@pytest.mark.parametrize("layout", [ONE, TWO, THREE], ids=str)
def test_the_bridge_says_what_its_dirichlet_does(layout: HeadLayout) -> None:
    prediction = predict_with("bridge", gaussian(layout), inputs(layout))
    alpha = prediction.log_concentration.double().exp().numpy()
    top, total = alpha.max(axis=1), alpha.sum(axis=1)
    expected = stats.beta.ppf([[0.025], [0.975]], top, total - top).T
    np.testing.assert_allclose(prediction.interval, expected, atol=1e-5)
    entropies = special.digamma(total + 1) - (alpha * special.digamma(alpha + 1)).sum(axis=1) / total
    np.testing.assert_allclose(prediction.mutual_info, stats.entropy(alpha, axis=1) - entropies, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"projection": "none"}, {"projection": "conditional"}])
def test_the_bridge_of_a_single_logit_is_the_beta_of_its_mean_and_variance(settings: dict[str, object]) -> None:
    posterior, features = gaussian(ONE), inputs(ONE)
    mean, variance = (part[:, 0] for part in posterior.logit_marginals(features))
    expected = torch.stack([(-mean).exp() + 1, mean.exp() + 1], dim=1) / variance.unsqueeze(1)
    got = predict_with("bridge", posterior, features, **settings).log_concentration
    torch.testing.assert_close(got, expected.log().float())


@pytest.mark.parametrize("settings", [{}, {"projection": "none"}, {"projection": "conditional"}, {"normalize": True}])
@pytest.mark.parametrize("layout", [ONE, TWO, THREE], ids=str)
def test_the_bridge_of_a_point_is_the_limit_of_small_equal_variances(
    layout: HeadLayout, settings: dict[str, object]
) -> None:
    theta, features = gaussian(layout).center, inputs(layout)
    prediction = predict_with("bridge", Point(theta, layout), features, **settings)
    logits = layout.logits(features, theta.unsqueeze(0))[0]
    logits = torch.cat([-logits / 2, logits / 2], dim=1) if layout is ONE else logits
    limit = dirichlet.mean(dirichlet.from_gaussian(logits, torch.full_like(logits, 1e-6)))
    torch.testing.assert_close(prediction.probs, limit.float())
    assert prediction.interval is not None
    torch.testing.assert_close(prediction.interval, prediction.probs.max(dim=1, keepdim=True).values.expand(-1, 2))
    assert prediction.mutual_info.max() < 1e-20


def test_conditioning_is_projecting_exactly_when_all_rows_have_the_same_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(5, 4, 4, generator=generator, dtype=torch.float64)
    mean, projection = torch.randn(5, 4, generator=generator, dtype=torch.float64), torch.eye(4).double() - 0.25
    for covariance, is_same in ((root @ root.mT, False), (projection @ root @ root.mT @ projection + 0.7, True)):
        conditional = condition_on_zero_sum(mean, covariance)
        projected = mean @ projection, (projection @ covariance @ projection).diagonal(dim1=1, dim2=2)
        assert all(map(torch.allclose, conditional, projected)) == is_same


def test_conditioning_restricts_the_density_to_logits_that_sum_to_zero() -> None:
    root = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mean, covariance = (
        torch.randn(1, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64),
        root @ root.mT,
    )
    basis = torch.linalg.svd(torch.ones(1, 4, dtype=torch.float64))[2][1:].T  # of the plane
    precision = torch.linalg.inv(covariance[0])
    restricted = basis @ torch.linalg.inv(basis.T @ precision @ basis) @ basis.T
    expected = (restricted @ precision @ mean[0]).unsqueeze(0), restricted.diagonal().unsqueeze(0)
    torch.testing.assert_close(condition_on_zero_sum(mean, covariance), expected)


def test_shrinking_acts_on_large_variances_alone_and_makes_them_tend_to_equal_probabilities() -> None:
    mean = torch.tensor([[2.0, 0.0, -1.0, -1.0]]).double()
    small, large = torch.full((1, 4), 0.3).double(), torch.full((1, 4), 1e8).double()
    assert all(map(torch.equal, shrink(mean, small), (mean, small)))
    plain, shrunk = (dirichlet.mean(dirichlet.from_gaussian(*pair)) for pair in ((mean, large), shrink(mean, large)))
    np.testing.assert_allclose(plain[0], [0.615, 0.158, 0.113, 0.113], atol=6e-4)
    np.testing.assert_allclose(shrunk[0], [0.25] * 4, atol=1e-3)
    torch.testing.assert_close(shrink(mean, large)[0] / shrink(mean, large)[1].sqrt(), mean / large.sqrt())
    assert shrink(mean, large)[1][0, 0].item() == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("probit", {"projection": "marginal"}, "probit, projection: expected one of none, sum-zero, difference; got"),
        ("bridge", {"projection": "difference"}, "bridge, projection: expected one of marginal, none, conditional"),
        ("mean-field", {"projection": "difference"}, "mean-field, projection: expected one of sum-zero, none; got"),
        ("mean-field", {"order": 3}, "mean-field, order: expected one of 0, 1, 2; got 3"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_integrator(name, **settings)


def test_the_difference_of_more_than_two_logits_is_refused() -> None:
    with pytest.raises(UsageError, match="expected two classes, but the head has 3"):
        predict_with("probit", gaussian(THREE), inputs(THREE), projection="difference")


def test_chunks_of_settings_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, features = gaussian(THREE), inputs(THREE)
    cases = [("bridge", {"projection": "conditional"}), ("mean-field", {"order": 2}), ("mean-field", {"order": 1})]
    whole = [predict_with(name, posterior, features, **settings) for name, settings in cases]
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", 3)
    for (name, settings), expected in zip(cases, whole, strict=True):
        torch.testing.assert_close(predict_with(name, posterior, features, **settings).probs, expected.probs)
    assert predict("bridge", posterior, features).interval is not None
