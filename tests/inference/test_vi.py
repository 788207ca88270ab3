"""Mean-field VI: the optimum of a Gaussian target in closed form, estimators beside one another, IVON, bounds, resuming."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.heads import THREE, by_noisy_sign, draw_theta, gaussian_at_mode, head_target
from problems.seeds import normal, seeded
from torch import Tensor, nn

from bnncli.commands.fit_vi import FitViOptions
from bnncli.errors import NumericError, UsageError
from bnncli.inference.elbo import diagnose_importance, elbo
from bnncli.inference.sghmc import largest_curvature
from bnncli.inference.vi import START_SHARE, ViPlan, estimate_shortfall, fit_vi, logit_draws
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget

ALL = 10**6


@dataclass(frozen=True)
class Quadratic:
    """A Gaussian likelihood with H and mean b in the place of data, under a prior: all is known in closed form."""

    layout: HeadLayout
    prior: Prior
    hessian: Tensor
    center: Tensor
    dtype: torch.dtype = torch.float64
    num_examples: int = 40
    device: ClassVar[torch.device] = torch.device("cpu")
    is_resident: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = False

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        away = theta - self.center
        pushed = away @ self.hessian
        value = -0.5 * (away * pushed).sum(dim=1) + self.prior.log_density(theta, self.layout)
        return value, self.prior.gradient(theta, self.layout) - pushed

    def hessian_operator(self, theta: Tensor) -> Any:
        return lambda vectors: vectors @ self.precision

    @property
    def precision(self) -> Tensor:
        return self.hessian + self.prior.diagonal(self.layout).diag()

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.pull())

    def pull(self, weight: float = 1.0) -> Tensor:
        """H b plus the weight times the prior's precisions times its mean, (P,)."""
        return self.hessian @ self.center + weight * self.prior.diagonal(self.layout) * self.prior.center(self.layout)


def exact_elbo(features: Tensor, signs: Tensor, mean: Tensor, log_sd: Tensor) -> Tensor:
    """Of one logit under a prior of precision 1: the expected log likelihood by Gauss-Hermite quadrature over the logit."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    logits = (features @ mean)[:, None] + (features**2 @ (2 * log_sd).exp()).sqrt()[:, None] * nodes
    likelihood = nn.functional.logsigmoid(signs[:, None] * logits) @ (weights / weights.sum())
    return likelihood.sum() - 0.5 * ((2 * log_sd).exp() + mean**2 - 1 - 2 * log_sd).sum()


@pytest.mark.parametrize(("num_steps", "is_short"), [(200, True), (FitViOptions().num_epochs(300), False)])
def test_the_default_steps_reach_the_maximum_of_the_elbo_and_fewer_are_noticed(num_steps: int, is_short: bool) -> None:
    """N = 300 and D = 10, against L-BFGS on the exact ELBO."""
    features, true = normal(300, 10, seed=1), 2 * normal(10, seed=2)
    labels = (torch.rand(300, generator=seeded(3), dtype=torch.float64) < (features @ true).sigmoid()).long()
    signs, layout = 2 * labels - 1.0, HeadLayout(1, 10, has_bias=False)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        parts = torch.from_numpy(values).requires_grad_()
        value = -exact_elbo(features, signs, parts[:10], parts[10:])
        value.backward()
        return value.item(), parts.grad.numpy()

    best = scipy.optimize.minimize(loss, np.zeros(20), jac=True, method="L-BFGS-B")
    target = LastLayerTarget(features.float(), labels, layout, Prior(1.0))
    plan = ViPlan(num_steps, 300, 0.01, estimator="local", patience=20)
    fit = fit_vi(target, plan, start=torch.zeros(10), generator=seeded())
    log_sd = 0.5 * fit.gaussian.covariance.variances.log()  # type: ignore[attr-defined]
    short = -best.fun - float(exact_elbo(features, signs, fit.gaussian.mean, log_sd))
    found = estimate_shortfall(target, fit.gaussian, generator=seeded(4))
    assert (short > 5, short < 0.1) == (is_short, not is_short)
    assert found.is_large(10) == is_short
    # The quadratic model is of the end: of a sigmoid it says too little from far away.
    assert 0.5 * short - 3 * found.standard_error < found.value < 1.2 * short + 3 * found.standard_error


@pytest.mark.parametrize(
    "how", [{}, {"num_draws": 1, "estimator": "local"}, {"optimizer": "ivon"}], ids=["reparam", "local", "ivon"]
)
@pytest.mark.parametrize("mean", [None, draw_theta(THREE, seed=4)], ids=["zero", "about a mean"])
def test_the_history_has_the_divergence_times_its_weight(how: dict[str, Any], mean: Tensor | None) -> None:
    """Of one step, before which nothing has moved: two weights differ by the divergence of the start, by torch.distributions."""
    prior = Prior(1.0) if mean is None else Prior(1.0).with_mean(mean, 1.0)
    target = head_target(THREE, 30, prior=prior)
    start = draw_theta(THREE)

    def first(weight: float) -> float:
        plan = replace(ViPlan(1, ALL, 1e-6, num_draws=4), kl_weight=weight, **how)
        return float(fit_vi(target, plan, start=start, generator=seeded()).history[0])

    prior_sd = target.prior.diagonal(THREE).rsqrt()
    q = torch.distributions.Normal(start.double(), START_SHARE * prior_sd)
    divergence = float(
        torch.distributions.kl_divergence(q, torch.distributions.Normal(prior.center(THREE), prior_sd)).sum()
    )
    assert first(0.25) - first(1.0) == pytest.approx(0.75 * divergence, rel=1e-4)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_shortfall_of_a_gaussian_target_is_exact(weight: float) -> None:
    """Its objective is quadratic in the means, and its Hessian the same everywhere."""
    target = quadratic()
    precision = target.hessian + weight * target.prior.diagonal(target.layout).diag()
    mean = torch.linalg.solve(precision, target.pull(weight))
    sd = (weight / precision.diagonal()).sqrt()
    away = torch.tensor([1.0, -2.0, 0.5, 0.1], dtype=torch.float64)
    for factor in (0.0, 1.0):
        gaussian = Gaussian(mean + factor * away, Diag(sd**2), target.layout)
        found = estimate_shortfall(target, gaussian, kl_weight=weight, generator=seeded(1))
        expected = 0.5 * factor * float(away @ precision @ away)
        assert abs(found.value - expected) < 4 * found.standard_error + 0.01 * expected
        assert found.standard_error < 0.2


def quadratic() -> Any:
    layout = HeadLayout(1, 3)
    root = torch.randn(4, 4, generator=seeded(), dtype=torch.float64)
    prior = Prior(2.0).with_mean(torch.tensor([0.5, 0.0, -1.0, 2.0]), 1.0)
    return Quadratic(layout, prior, 3 * root @ root.T, torch.ones(4, dtype=torch.float64))


def fitted(target: Any, **changes: Any) -> Any:
    plan = replace(ViPlan(epochs=900, batch_size=ALL, learning_rate=0.05, num_draws=8), **changes)
    start = torch.zeros(target.layout.num_params, dtype=torch.float64)
    return fit_vi(target, plan, start=start, generator=seeded())


@pytest.mark.parametrize(
    "how",
    [{}, {"optimizer": "ivon", "learning_rate": 0.3, "hessian_decay": 0.995, "kl_weight": 0.3}, {"kl_weight": 0.1}],
    ids=["adam", "ivon", "cold"],
)
def test_the_optimum_of_a_gaussian_target_is_its_mean_and_one_over_its_precisions(how: dict[str, Any]) -> None:
    target = quadratic()
    fit = fitted(target, **how)
    weight = how.get("kl_weight", 1.0)
    precision = target.hessian + weight * target.prior.diagonal(target.layout).diag()
    mean = torch.linalg.solve(precision, target.pull(weight))
    variances = weight / precision.diagonal()
    torch.testing.assert_close(fit.gaussian.mean, mean, rtol=0, atol=0.05)
    torch.testing.assert_close(fit.gaussian.covariance.variances, variances, rtol=0.08, atol=0)


def network_layout(*layers: nn.Module, shape: tuple[int, ...], outputs: int = 3) -> ModuleLayout:
    torch.manual_seed(0)
    module = nn.Sequential(*layers).double().eval()
    return ModuleLayout.of(ModuleNetwork(module), num_outputs=outputs, input_shape=shape)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_draws_of_a_networks_logits_have_the_moments_of_draws_of_its_weights(estimator: str) -> None:
    """Of one layer the logits of an example are jointly Gaussian, whichever way they are drawn."""
    layers: tuple[nn.Module, ...] = (nn.Linear(4, 3),)
    shape: tuple[int, ...] = (4,)
    if estimator == "flipout":
        layers, shape = (nn.Conv2d(2, 2, 2, padding=1, groups=2), nn.Flatten(), nn.AvgPool1d(6)), (2, 2, 2)
    layout = network_layout(*layers, shape=shape)
    mean, sd = layout.trained(), 0.3 + layout.trained().abs()
    inputs = torch.randn(1, layout.num_features, generator=seeded(), dtype=torch.float64)
    generator, draw = seeded(2), logit_draws(layout, estimator)
    found = torch.cat([draw(mean, sd, inputs.expand(500, -1), generator) for _ in range(40)])
    theta = mean + sd * torch.randn(20_000, len(mean), generator=generator, dtype=torch.float64)
    expected = layout.logits(inputs, theta)[:, 0]
    torch.testing.assert_close(found.mean(dim=0), expected.mean(dim=0), rtol=0, atol=0.05 * float(expected.std()))
    torch.testing.assert_close(found.T.cov(), expected.T.cov(), rtol=0, atol=0.06 * float(expected.var()))


def test_layers_that_an_estimator_does_not_do_are_refused() -> None:
    convolution = network_layout(nn.Conv2d(1, 3, 2), nn.Flatten(), shape=(1, 2, 2))
    with pytest.raises(UsageError, match="supports only linear layers; 0 is Conv2d"):
        logit_draws(convolution, "local")
    shared = nn.Linear(4, 4)
    twice = network_layout(shared, nn.Tanh(), shared, shape=(4,), outputs=4)
    ones = torch.ones(twice.num_params, dtype=torch.float64)
    with pytest.raises(UsageError, match="shares its weights across several positions"):
        logit_draws(twice, "local")(ones, ones, torch.ones(2, 4, dtype=torch.float64), seeded())
    normed = network_layout(nn.Linear(4, 3), nn.LayerNorm(3), shape=(4,))
    with pytest.raises(UsageError, match="1 is LayerNorm"):
        logit_draws(normed, "flipout")


@pytest.mark.parametrize("estimator", [pytest.param("reparam", marks=pytest.mark.long), "local"])
def test_the_elbo_stays_below_the_evidence_and_above_that_of_the_start(estimator: str) -> None:
    target = head_target(HeadLayout(1, 2), 60, labels=by_noisy_sign, prior=0.5)
    fit = fitted(target, estimator=estimator, epochs=40, batch_size=20, num_draws=1, learning_rate=0.1)
    exact = diagnose_importance(target, gaussian_at_mode(target), generator=seeded())
    found = elbo(target, fit.gaussian, generator=seeded(), num_samples=1000)
    assert found.value < exact.log_evidence + 4 * (found.standard_error + (exact.log_evidence_error or 0))
    assert found.value > exact.log_evidence - 0.6
    assert fit.history[0] < fit.history[-10:].mean() - 1
    assert fit.history[-10:].mean() == pytest.approx(found.value, abs=1.5)


@pytest.mark.parametrize("how", [{}, {"estimator": "local"}, {"optimizer": "ivon"}], ids=str)
def test_a_resumed_fit_is_the_same(how: dict[str, Any]) -> None:
    target, start = head_target(THREE, 40, dtype=torch.float32), torch.zeros(15)
    plan, states = ViPlan(12, 9, 0.05, **how), []
    whole = fit_vi(target, plan, start=start, generator=seeded(), save=lambda state, _: states.append(state))
    assert len(states) > 1
    again = fit_vi(target, plan, start=start + 1, generator=seeded(5), state=states[0])
    assert torch.equal(again.gaussian.mean, whole.gaussian.mean)
    assert torch.equal(again.gaussian.covariance.variances, whole.gaussian.covariance.variances)
    assert torch.equal(again.history, whole.history)


def test_a_learning_rate_that_diverges_is_an_error() -> None:
    target = head_target(THREE, 40)
    with pytest.raises(NumericError, match="ELBO is not finite"):
        fit_vi(target, ViPlan(40, 9, 1e5), start=torch.zeros(15), generator=seeded())


def test_ivon_starts_where_its_steps_are_stable_under_a_weak_prior() -> None:
    generator = seeded()
    weight = torch.randn(4, 20, generator=generator)
    features = 3 * torch.randn(400, 20, generator=generator)
    labels = (features @ weight.T + 2 * torch.randn(400, 4, generator=generator)).argmax(dim=1)
    layout = HeadLayout(4, 20)
    target, start = LastLayerTarget(features, labels, layout, Prior(0.05)), torch.zeros(layout.num_params)
    plan = ViPlan(40, 100, 0.1, optimizer="ivon")
    wild, stable = (
        fit_vi(target, replace(plan, stiffness=stiffness), start=start, generator=seeded())
        for stiffness in (0.0, largest_curvature(target, start.double(), seeded()))
    )
    assert float(wild.history[0]) < 3 * float(stable.history[0])  # of such a start the first epoch is far off
    assert float(stable.history.min()) == float(stable.history[0])
