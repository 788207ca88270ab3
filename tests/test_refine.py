"""Refinement: the ELBO it starts from, what it gains, what bounds it."""

import math

import pytest
import torch

from bnncli import registry
from bnncli.errors import NumericError, UsageError
from bnncli.flows import SPACES, build_layers
from bnncli.inference.elbo import elbo, elbo_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import _Problem, fit_flow
from bnncli.layout import HeadLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.likelihood import label_indicators

every_flow = pytest.mark.parametrize("kind", registry.names("flows"))
every_flow_and_space = pytest.mark.parametrize(
    ("kind", "space"),
    [(kind, space) for kind in registry.names("flows") for space in registry.load_class("flows", kind).spaces],
)
every_space = pytest.mark.parametrize("space", SPACES)
LAYOUTS = [HeadLayout(3, 2), HeadLayout(1, 1)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_target(layout: HeadLayout, num_examples: int = 24, likelihood_scale: float = 1.0) -> LastLayerTarget:
    features = torch.randn(num_examples, layout.num_features, generator=seeded(), dtype=torch.float64)
    labels = (features[:, 0] > 0).long()
    return LastLayerTarget(features, labels, layout, 0.3, likelihood_scale)


def make_base(target: LastLayerTarget, structure: str = "full") -> Gaussian:
    return fit_gaussian(target, start=torch.zeros(target.layout.num_params), structure=structure).gaussian


@every_flow_and_space
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_estimates_are_the_log_weights_of_the_flow(kind: str, space: str, layout: HeadLayout) -> None:
    target = make_target(layout)
    base = make_base(target)
    layers = build_layers(kind, layout, seeded(), length=3)
    for layer in layers:
        for parameter in layer.requires_grad_(False).parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
    indicators = label_indicators(target.labels, layout, torch.float64)
    noise = base.noise(7, seeded())
    problem = _Problem(target, base.mean, base, space)
    estimates = problem.elbo_estimate(layers, noise, target.features, indicators)
    theta, log_density = Flow(base, layers, kind, space).from_noise(noise)
    prior_constant = 0.5 * layout.num_params * math.log(0.3 / (2 * math.pi))
    base_log_density = base.from_noise(noise)[1]
    expected = target.log_joint(theta) - (log_density - base_log_density) - prior_constant
    torch.testing.assert_close(estimates, expected)


@every_space
def test_refine_starts_at_the_laplace_elbo(space: str) -> None:
    target = make_target(LAYOUTS[0])
    base = make_base(target)
    fit = fit_flow(
        target,
        base,
        generator=seeded(),
        length=1,
        epochs=1,
        batch_size=24,
        learning_rate=1e-12,
        num_draws=4000,
        space=space,
    )
    untrained = elbo(target, fit.posterior, generator=seeded(1), num_samples=4000)
    assert abs(float(fit.history[0]) - untrained.value) < 6 * untrained.standard_error


@every_flow
def test_refining_a_diagonal_base_gains(kind: str) -> None:
    target = make_target(LAYOUTS[1])
    base = make_base(target, "diag")
    fit = fit_flow(
        target,
        base,
        generator=seeded(),
        flow=kind,
        length=4,
        epochs=300,
        batch_size=24,
        learning_rate=0.01 if kind == "spline" else 0.03,
        num_draws=16,
    )
    gain, error = elbo_gain(target, base, fit.posterior, generator=seeded(1), num_samples=4000)
    assert gain > 4 * error
    assert gain > 0.02


def test_refined_elbo_stays_below_the_evidence() -> None:
    target = make_target(LAYOUTS[1])
    base = make_base(target)
    fit = fit_flow(target, base, generator=seeded(), epochs=200, batch_size=24, learning_rate=0.03, num_draws=16)
    axis = torch.linspace(-12, 12, 401, dtype=torch.float64)
    theta = base.mean + base.covariance.unwhiten(torch.cartesian_prod(axis, axis))
    cell = 2 * math.log(24 / 400) + base.covariance.log_det_scale()
    log_evidence = float(target.log_joint(theta).logsumexp(dim=0)) + cell
    before, after = (elbo(target, q, generator=seeded(1), num_samples=4000) for q in (base, fit.posterior))
    assert before.value - 4 * before.standard_error < after.value
    assert after.value < log_evidence + 4 * after.standard_error
    assert float(fit.history[-20:].mean()) == pytest.approx(after.value, abs=0.2)


def test_a_base_that_is_the_posterior_stays_as_it_is() -> None:
    target = make_target(LAYOUTS[0], likelihood_scale=0.0)
    base = make_base(target)
    fit = fit_flow(
        target, base, generator=seeded(), length=2, epochs=150, batch_size=24, learning_rate=0.01, num_draws=16
    )
    value = elbo(target, fit.posterior, generator=seeded(), num_samples=500).value
    assert value == pytest.approx(0, abs=0.01)
    assert all(abs(layer.summary()["beta"]) < 0.05 for layer in fit.posterior.layers)


def test_minibatches_with_an_uneven_last_one_train_too() -> None:
    target = make_target(LAYOUTS[1], num_examples=25)
    base = make_base(target, "diag")
    fit = fit_flow(target, base, generator=seeded(), epochs=150, batch_size=8, learning_rate=0.03, num_draws=8)
    gain, error = elbo_gain(target, base, fit.posterior, generator=seeded(1), num_samples=2000)
    assert fit.history.shape == (150,)
    assert gain > 4 * error


def test_a_seed_gives_the_same_bits() -> None:
    target = make_target(LAYOUTS[0])
    base = make_base(target)
    first, second, other = (
        fit_flow(target, base, generator=seeded(seed), epochs=2, batch_size=8) for seed in (3, 3, 4)
    )
    names = first.posterior.to_tensors()[0]
    assert all(torch.equal(part, second.posterior.to_tensors()[0][name]) for name, part in names.items())
    assert torch.equal(first.history, second.history)
    assert not torch.equal(first.history, other.history)


def test_a_learning_rate_that_diverges_is_named() -> None:
    target = make_target(LAYOUTS[0])
    with pytest.raises(NumericError, match="ELBO is not finite in epoch") as caught:
        fit_flow(target, make_base(target), generator=seeded(), epochs=3, batch_size=8, learning_rate=1e200)
    assert caught.value.hint is not None
    assert "--learning-rate below 1e+200" in caught.value.hint


def test_unknown_flow_and_space_are_refused() -> None:
    target = make_target(LAYOUTS[0])
    with pytest.raises(UsageError, match=r"expected one of .*planar, radial"):
        fit_flow(target, make_base(target), generator=seeded(), flow="spiral")
    with pytest.raises(UsageError, match="--space: radial layers act in whitened or weight space; got 'raw'"):
        fit_flow(target, make_base(target), generator=seeded(), space="raw")
