"""Integrators against quadrature, naive averages and each other."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from problems.heads import ONE, THREE, TWO
from problems.outputs import Told
from problems.posteriors import Draws, gaussian, inputs, predict
from scipy import integrate, special, stats

from bnncli import integrators
from bnncli.errors import NumericError, UsageError
from bnncli.integrators import Integrator, SamplingIntegrator, _draws, load_integrator, require_support, supports
from bnncli.integrators.probit import binary_probit_probs
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.samples import Samples
from bnncli.registry import names

LAYOUTS = [ONE, TWO, THREE]


def layouts_for(name: str) -> list[HeadLayout]:
    """The layouts with few enough classes for an integrator."""
    return [layout for layout in LAYOUTS if layout.num_classes <= load_integrator(name).max_classes]


PAIRS = [
    pytest.param(name, layout, id=f"{name}-{layout}") for name in names("integrators") for layout in layouts_for(name)
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_every_integrator_gives_probabilities_and_their_entropy(name: str, layout: HeadLayout) -> None:
    prediction = predict(name, gaussian(layout), inputs(layout))
    assert prediction.probs.shape == (7, layout.num_classes)
    assert prediction.probs.dtype == prediction.entropy.dtype == torch.float32
    np.testing.assert_allclose(prediction.probs.double().sum(dim=1), 1, atol=1e-6)
    np.testing.assert_allclose(prediction.entropy, stats.entropy(prediction.probs.double(), axis=1), atol=1e-6)
    assert prediction.mutual_info is not None or not load_integrator(name).is_sampling


@pytest.mark.parametrize(
    ("name", "layout"), [pair for pair in PAIRS if pair.values[0] != "bridge"]
)  # whose limit is another
def test_every_integrator_is_the_softmax_without_uncertainty(name: str, layout: HeadLayout) -> None:
    posterior, features = gaussian(layout, scale=0.0), inputs(layout)
    logits = layout.logits(features, posterior.center.unsqueeze(0))[0].numpy()
    if layout.num_outputs == 1:
        expected = np.concatenate([special.expit(-logits), special.expit(logits)], axis=1)
    else:
        expected = special.softmax(logits, axis=1)
    np.testing.assert_allclose(predict(name, posterior, features).probs, expected, atol=1e-6)


@pytest.mark.parametrize("name", names("integrators"))
def test_the_seed_decides_every_bit(name: str) -> None:
    layout = layouts_for(name)[-1]
    posterior, features = gaussian(layout), inputs(layout)
    assert torch.equal(predict(name, posterior, features).probs, predict(name, posterior, features).probs)


@pytest.mark.parametrize("name", names("integrators"))
def test_progress_ends_at_the_total_it_announced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", 6)
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 2)
    told, generator = Told(), torch.Generator().manual_seed(2)
    layout = layouts_for(name)[-1]
    posterior = gaussian(layout)
    ready = load_integrator(name).prepare(posterior, num_samples=5, generator=generator, target=posterior)
    ready.predict(posterior, inputs(layout), num_samples=5, generator=generator, progress=told)
    assert sum(told.steps) == told.tasks[0][1] > 1


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_chunks_do_not_change_a_prediction(name: str, layout: HeadLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, features = gaussian(layout), inputs(layout)
    whole = predict(name, posterior, features)
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", 6)
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 2)
    chunked = predict(name, posterior, features)
    torch.testing.assert_close(chunked.probs, whole.probs, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked.mutual_info, whole.mutual_info, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked.interval, whole.interval, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", names("integrators"))
def test_an_empty_split_gives_an_empty_prediction(name: str) -> None:
    layout = layouts_for(name)[-1]
    assert predict(name, gaussian(layout), inputs(layout, count=0)).probs.shape == (0, layout.num_classes)


@pytest.mark.parametrize("name", names("integrators"))
def test_features_of_another_width_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"features: expected shape \(N, 4\)"):
        predict(name, gaussian(layouts_for(name)[-1]), torch.zeros(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("name", names("integrators"))
def test_a_posterior_that_is_not_finite_is_an_error(name: str) -> None:
    layout = layouts_for(name)[-1]
    posterior = gaussian(layout)
    posterior.center[0] = math.nan
    with pytest.raises(NumericError, match="7 of 7 examples"):
        predict(name, posterior, inputs(layout))


@pytest.mark.parametrize("mean", [-2.0, 0.5, 3.0])
def test_mc_converges_to_the_binary_integral(mean: float) -> None:
    layout, deviation, num_samples = HeadLayout(1, 1, has_bias=False), 2.0, 40_000
    posterior = Draws(layout, torch.tensor([mean]).double(), torch.tensor([[deviation]]).double())

    def moment(power: int) -> float:
        density = stats.norm(mean, deviation).pdf
        return integrate.quad(lambda f: special.expit(f) ** power * density(f), mean - 20, mean + 20)[0]

    exact = moment(1)
    standard_error = math.sqrt((moment(2) - exact**2) / num_samples)
    estimate = predict("mc", posterior, torch.ones(1, 1).double(), num_samples=num_samples).probs[0, 1].item()
    assert abs(estimate - exact) < 4 * standard_error
    assert standard_error <= 0.5 / math.sqrt(num_samples)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mc_is_the_naive_mean_over_stored_draws(layout: HeadLayout) -> None:
    draws = 2 * torch.randn(3, 5, layout.num_params, generator=torch.Generator().manual_seed(3))
    features = inputs(layout).float()
    prediction = predict("mc", Samples(draws, layout), features, num_samples=None)
    logits = layout.logits(features.double(), draws.flatten(0, 1).double()).numpy()
    if layout.num_outputs == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=2)
    probs = special.softmax(logits, axis=2)
    entropy = stats.entropy(probs.mean(axis=0), axis=1)
    np.testing.assert_allclose(prediction.probs, probs.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(prediction.entropy, entropy, atol=1e-6)
    assert prediction.mutual_info is not None
    np.testing.assert_allclose(prediction.mutual_info, entropy - stats.entropy(probs, axis=2).mean(axis=0), atol=2e-6)


def test_mc_shares_its_draws_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 1)
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", 3)
    probs = predict("mc", gaussian(LAYOUTS[2]), inputs(LAYOUTS[2], count=1).expand(4, -1), num_samples=3).probs
    assert torch.equal(probs, probs[:1].expand_as(probs))


def test_mc_ignores_what_all_logits_share() -> None:
    layout = LAYOUTS[2]
    generator = torch.Generator().manual_seed(4)
    draws = torch.randn(1, 9, layout.num_params, generator=generator, dtype=torch.float64)
    common = torch.randn(1, 9, 1, 5, generator=generator, dtype=torch.float64).expand(-1, -1, 3, -1)
    shifted = draws + layout.flatten(common)
    probs = [predict("mc", Samples(d, layout), inputs(layout), num_samples=None).probs for d in (draws, shifted)]
    assert not torch.equal(draws, shifted)
    torch.testing.assert_close(probs[0], probs[1], atol=1e-6, rtol=0)


def test_mutual_information_is_log_two_when_two_sure_draws_disagree() -> None:
    layout = HeadLayout(2, 1, has_bias=False)
    draws = torch.tensor([[[200.0, -200.0], [-200.0, 200.0]]])
    prediction = predict("mc", Samples(draws, layout), torch.ones(1, 1), num_samples=None)
    assert prediction.mutual_info.item() == pytest.approx(math.log(2))
    assert prediction.entropy.item() == pytest.approx(math.log(2))


def test_plug_in_of_samples_is_the_softmax_at_their_mean() -> None:
    layout = LAYOUTS[2]
    draws = torch.randn(2, 6, layout.num_params, generator=torch.Generator().manual_seed(6))
    features = inputs(layout).float()
    expected = special.softmax(layout.logits(features, draws.mean(dim=(0, 1))[None])[0].numpy(), axis=1)
    np.testing.assert_allclose(predict("plug-in", Samples(draws, layout), features).probs, expected, atol=1e-6)


@pytest.mark.parametrize("extent", [5, 10, 20])
def test_binary_probit_stays_close_to_the_integral(extent: int) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    mean, deviation = (axis.ravel() for axis in np.meshgrid(*[np.linspace(0, extent, 21)] * 2))
    exact = special.expit(mean[:, None] + deviation[:, None] * nodes) @ (weights / weights.sum())
    variance = torch.tensor(deviation**2)[:, None]
    approximate = binary_probit_probs(torch.tensor(mean)[:, None], variance)[:, 1].numpy()
    # The supremum is .0177; quadrature of a steep sigmoid with 200 nodes adds up to .001.
    assert 0.008 < np.abs(approximate - exact).max() < 0.0187


def test_probit_follows_the_variance_of_each_example() -> None:
    layout = LAYOUTS[2]
    posterior, features = gaussian(layout), inputs(layout)
    for row, probs in zip(features, predict("probit", posterior, features).probs, strict=True):
        augmented = torch.cat([row, torch.ones(1)])
        sigma = posterior.draws.scale @ posterior.draws.scale.T
        scaled = []
        for k in range(3):
            jacobian = layout.flatten(torch.eye(3, dtype=torch.float64)[:, k, None] * augmented)
            scaled.append(jacobian @ posterior.center / (1 + math.pi / 8 * jacobian @ sigma @ jacobian).sqrt())
        np.testing.assert_allclose(probs, special.softmax(scaled), atol=1e-6)


def test_a_flow_supports_only_sampling_and_the_error_says_so() -> None:
    flow = gaussian(LAYOUTS[2]).draws
    assert [name for name in names("integrators") if supports(name, flow)] == ["mc"]
    with pytest.raises(UsageError, match="plug-in needs a posterior with center; a flow") as caught:
        require_support("plug-in", flow)
    assert caught.value.hint == "integrators for a flow posterior: mc"


@pytest.mark.parametrize("name", names("integrators"))
def test_predicting_without_the_capability_is_a_usage_error(name: str) -> None:
    class Nothing:
        type = "nothing"
        layout = LAYOUTS[2]

    with pytest.raises(UsageError, match=f"{name} needs a posterior with {load_integrator(name).needs}") as caught:
        predict(name, Nothing(), inputs(LAYOUTS[2]))
    assert caught.value.hint == "integrators for a nothing posterior: none"


@pytest.mark.parametrize("name", names("integrators"))
def test_what_an_integrator_leaves_out_is_declared_in_one_place(name: str) -> None:
    """A hook that the protocol does not know would be asked for nowhere."""
    integrator = load_integrator(name)
    protocol = SamplingIntegrator if integrator.is_sampling else Integrator
    own = {hook for hook in vars(type(integrator)) if not hook.startswith("_")}
    assert protocol in type(integrator).mro()
    assert own - {spec.name for spec in fields(integrator)} <= set(dir(protocol))  # type: ignore[arg-type]


def test_mutual_information_is_never_negative() -> None:
    layout = LAYOUTS[2]
    draws = torch.randn(layout.num_params, generator=torch.Generator().manual_seed(5)).expand(1, 200, -1)
    prediction = predict("mc", Samples(draws, layout), inputs(layout, count=500).float(), num_samples=None)
    assert 0 <= prediction.mutual_info.min() <= prediction.mutual_info.max() < 1e-5
