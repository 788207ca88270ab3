"""Integrators of several labels, of logits drawn, and of networks passed through."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from problems.heads import LAYOUTS, at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from scipy import stats
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.detectors import DETECTORS
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import Prediction, entropy, load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.likelihoods import MULTILABEL
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.posteriors.samples import Samples
from bnncli.structures.diag import Diag
from bnncli.structures.logits import root_of_covariances
from bnncli.targets.last_layer import LastLayerTarget

NUM_LABELS = 3
LAYOUT = HeadLayout(NUM_LABELS, 4, likelihood_name=MULTILABEL)


@cache
def make_target() -> LastLayerTarget:
    generator = seeded(0)
    features = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    labels = (torch.rand(40, NUM_LABELS, generator=generator) < torch.tensor([0.2, 0.5, 0.7])).to(torch.uint8)
    return LastLayerTarget(features, labels, LAYOUT, Prior(0.5))


@cache
def gaussians(structure: str) -> tuple[Gaussian, list[Gaussian]]:
    """The posterior, and those of each label by itself."""
    target = make_target()
    whole = fit_gaussian(target, structure=structure, start=torch.zeros(LAYOUT.num_params)).gaussian
    layout = HeadLayout(1, 4)
    alone = [replace(target, labels=one.long(), layout=layout) for one in target.labels.T]
    return whole, [
        fit_gaussian(one, structure=structure, start=torch.zeros(layout.num_params)).gaussian for one in alone
    ]


def features(num_examples: int = 50) -> Tensor:
    return 2 * torch.randn(num_examples, 4, generator=seeded(1))


def predict(name: str, posterior: Any, **settings: Any) -> Prediction:
    num_samples = settings.pop("num_samples", None)
    integrator = load_integrator(name, **settings)
    ready = integrator.prepare(posterior, num_samples=num_samples, generator=seeded(2), target=make_target())
    return ready.predict(posterior, features(), num_samples=num_samples, generator=seeded(2))


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("name", ["plug-in", "probit", "quadrature", "mean-field", "bridge"])
def test_without_draws_each_label_is_predicted_as_by_itself(name: str, structure: str) -> None:
    whole, alone = gaussians(structure)
    found, single = predict(name, whole), [predict(name, one) for one in alone]
    expected = torch.stack([one.probs[:, 1] for one in single], dim=1)
    torch.testing.assert_close(found.probs, expected, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(found.entropy, sum(one.entropy for one in single), rtol=1e-3, atol=1e-3)
    if found.mutual_info is not None and found.interval is not None:
        info = [one.mutual_info for one in single if one.mutual_info is not None]
        torch.testing.assert_close(found.mutual_info, sum(info), rtol=2e-3, atol=1e-3)
        assert found.interval.shape == (50, NUM_LABELS, 2)


@pytest.mark.parametrize(
    ("name", "settings"), [("mc", {}), ("mc", {"qmc": True}), ("logit-mc", {})], ids=["mc", "qmc", "logit-mc"]
)
def test_draws_agree_with_quadrature_in_probabilities_information_and_intervals(name: str, settings: Any) -> None:
    whole, _ = gaussians("full")
    found, exact = predict(name, whole, num_samples=8192, **settings), predict("quadrature", whole)
    for field, close in {"probs": 0.02, "entropy": 0.06, "mutual_info": 0.06, "interval": 0.06}.items():
        torch.testing.assert_close(getattr(found, field), getattr(exact, field), rtol=0, atol=close)


def test_weighted_draws_predict_what_the_weighted_draws_of_each_label_do() -> None:
    (whole, alone), target = gaussians("full"), make_target()
    found = predict("importance", whole, num_samples=3000)
    layout = HeadLayout(1, 4)
    for k, one in enumerate(alone):
        own = replace(target, labels=target.labels[:, k].long(), layout=layout)
        ready = load_integrator("importance").prepare(one, num_samples=3000, generator=seeded(5), target=own)
        single = ready.predict(one, features(), num_samples=None, generator=seeded(5))
        torch.testing.assert_close(found.probs[:, k], single.probs[:, 1], rtol=0, atol=0.06)


def test_draws_are_averaged_label_by_label_however_they_are_cut() -> None:
    whole, _ = gaussians("full")
    theta = whole.sample(60, seeded(3))
    samples = Samples(theta.view(3, 20, -1), LAYOUT)
    ready = load_integrator("mc").prepare(samples, num_samples=None, generator=seeded(0))
    rows = torch.tensor([0, 7, 30])
    found = ready.predict(samples, features(), num_samples=None, generator=seeded(0), group_rows=rows)  # type: ignore[call-arg]
    probs = torch.sigmoid(LAYOUT.logits(features(), theta))
    torch.testing.assert_close(found.probs, probs.mean(dim=0))
    torch.testing.assert_close(found.entropy, entropy(found.probs, is_exclusive=False).float())
    expected = torch.distributions.Bernoulli(probs=probs.double()).entropy().mean(dim=0).sum(dim=1)
    assert found.group_probs is not None
    torch.testing.assert_close(found.mutual_info.double(), found.entropy.double() - expected, rtol=1e-4, atol=1e-5)
    ends = np.quantile(probs.double().numpy(), [0.025, 0.975], axis=0, method="weibull")
    torch.testing.assert_close(found.interval, torch.from_numpy(np.moveaxis(ends, 0, -1)).float())
    torch.testing.assert_close(found.group_probs.mean(dim=0), found.probs[rows])
    kept = ready.probs_of_draws(samples, features())
    torch.testing.assert_close(kept.float(), probs, rtol=0, atol=1e-3)


def test_the_energy_is_the_joint_one_and_the_largest_logit_is_over_the_labels() -> None:
    theta = torch.randn(LAYOUT.num_params, generator=seeded(4))
    logits = LAYOUT.logits(features(), theta[None])[0]
    energy, largest = energy_and_max_logit(features(), theta, LAYOUT)
    torch.testing.assert_close(energy, -logits.exp().log1p().sum(dim=1))
    assert torch.equal(largest, logits.amax(dim=1))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_bridge_gives_each_label_the_beta_of_its_logit(normalize: bool) -> None:
    whole, _ = gaussians("full")
    found = predict("bridge", whole, normalize=normalize)
    mean, variance = (part.double().numpy() for part in whole.logit_marginals(features()))
    excess = np.maximum(variance / 4, 1) if normalize else 1
    mean, variance = mean / np.sqrt(excess), variance / excess
    beta = stats.beta((1 + np.exp(mean)) / variance, (1 + np.exp(-mean)) / variance)
    np.testing.assert_allclose(found.probs, beta.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.probs, 1 / (1 + np.exp(-mean)), rtol=1e-5)
    assert found.interval is not None
    np.testing.assert_allclose(
        found.interval, np.stack([beta.ppf(0.025), beta.ppf(0.975)], axis=2), rtol=1e-4, atol=1e-6
    )
    values = found.log_concentration
    of_predictions = DETECTORS["dirichlet_variance"].of_predictions
    rows = of_predictions(None, values.numpy())  # type: ignore[arg-type]
    np.testing.assert_allclose(rows, -beta.var().sum(axis=1), rtol=1e-4)


def test_what_is_for_classes_that_exclude_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gaussians("full")
    monkeypatch.setattr(type(load_integrator("bridge")), "takes_labels", False)
    with pytest.raises(
        UsageError, match="bridge needs mutually exclusive classes, but the data are multi-label"
    ) as info:
        predict("bridge", whole)
    assert "quadrature" in str(info.value.hint)
    assert "bridge" not in str(info.value.hint)
    with pytest.raises(UsageError, match="difference: expected two classes, but the data are multi-label"):
        predict("probit", whole, projection="difference")


every_layout = pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))


def make_gaussian(structure: str, layout: HeadLayout, prior: Prior | None = None) -> Gaussian:
    prior = prior or Prior(0.5, 2.0 if layout.has_bias else None)
    return gaussian_at_mode(head_target(layout, labels=at_random_by(0), prior=prior), structure)


def inputs(count: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=seeded(1), dtype=dtype)


@every_structure
@every_layout
def test_roots_square_to_the_logits_covariance(structure: str, layout: HeadLayout) -> None:
    gaussian = make_gaussian(structure, layout)
    mean, covariance = gaussian.logit_moments(inputs())
    found_mean, root = gaussian.logit_root(inputs())
    columns = root.apply(torch.eye(layout.num_outputs, dtype=torch.float64)).permute(2, 1, 0)
    torch.testing.assert_close(found_mean, mean)
    torch.testing.assert_close(columns @ columns.mT, covariance)


@pytest.mark.parametrize("structure", ["kron", "block", "diag"])
def test_roots_hold_no_matrix_for_each_example(structure: str) -> None:
    assert make_gaussian(structure, LAYOUTS[0]).logit_root(inputs())[1].scale.shape == (6, 3)


@every_structure
@every_layout
def test_drawn_logits_have_the_exact_moments(structure: str, layout: HeadLayout) -> None:
    gaussian, size = make_gaussian(structure, layout), 20_000
    mean, covariance = gaussian.logit_moments(inputs())
    _, root = gaussian.logit_root(inputs())
    noise = torch.randn(size, layout.num_outputs, generator=seeded(2), dtype=torch.float64)
    deviations = root.apply(noise)
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert (deviations.mean(dim=0).T / sd).abs().max() < 4.5 / math.sqrt(size)
    for n in range(len(mean)):
        empirical = torch.atleast_2d(torch.cov(deviations[:, :, n].T))
        assert ((empirical - covariance[n]) / sd[n].outer(sd[n])).abs().max() < 4.5 * math.sqrt(2 / size)


@every_structure
def test_logits_without_variance_are_drawn_at_their_mean(structure: str) -> None:
    gaussian = make_gaussian(structure, LAYOUTS[1])
    features = torch.cat([torch.zeros(1, 4, dtype=torch.float64), inputs(1)])
    prediction = load_integrator("logit-mc").predict(gaussian, features, num_samples=50, generator=seeded())
    np.testing.assert_allclose(prediction.probs[0], np.full(3, 1 / 3), atol=1e-6)
    widths = prediction.interval[:, 1] - prediction.interval[:, 0]
    assert widths[0] < 1e-6 < 0.01 < widths[1]


def test_a_weak_prior_leaves_covariances_that_can_be_drawn_from() -> None:
    gaussian = make_gaussian("full", LAYOUTS[0], Prior(1e-9))
    features = inputs(200, torch.float32)
    _, root = gaussian.logit_root(features)
    columns = root.apply(torch.eye(3)).permute(2, 1, 0).double()
    contrast = torch.eye(3, dtype=torch.float64) - 1 / 3  # what the common offset, of variance 1e9, leaves alone
    _, covariance = gaussian.logit_moments(features.double())
    expected = contrast @ covariance @ contrast
    found = contrast @ columns
    torch.testing.assert_close(found @ found.mT, expected, rtol=1e-2, atol=1e-3)


def test_a_root_of_a_singular_matrix_comes_from_its_eigenvalues() -> None:
    vectors = torch.randn(5, 4, 2, generator=seeded(), dtype=torch.float64)
    singular = vectors @ vectors.mT
    roots = root_of_covariances(torch.cat([singular, torch.eye(4, dtype=torch.float64)[None]])).scale
    torch.testing.assert_close(roots @ roots.mT, torch.cat([singular, torch.eye(4, dtype=torch.float64)[None]]))


@every_structure
@every_layout
def test_predictions_agree_with_draws_of_theta(structure: str, layout: HeadLayout) -> None:
    gaussian, size = make_gaussian(structure, layout), 20_000
    found, reference = (
        load_integrator(name).predict(gaussian, inputs(), num_samples=size, generator=seeded(seed))
        for name, seed in (("logit-mc", 3), ("mc", 4))
    )
    kept = load_integrator("mc").prepare(gaussian, num_samples=2000, generator=seeded(5))  # type: ignore[attr-defined]
    sd = kept.probs_of_draws(gaussian, inputs()).double().std(dim=0)
    assert ((found.probs - reference.probs).abs() < 4.5 * math.sqrt(2 / size) * sd + 1e-6).all()
    # An entropy is at most log C and so has a standard deviation of at most half of that.
    allowed = 4.5 * math.sqrt(2 / size) * math.log(layout.num_classes)
    torch.testing.assert_close(found.mutual_info, reference.mutual_info, atol=allowed, rtol=0)
    # A quantile's error is that of its probability, over the density; 0.02 is six times what 20,000 draws leave here.
    torch.testing.assert_close(found.interval, reference.interval, atol=0.02, rtol=0)


@pytest.mark.parametrize("qmc", [False, True])
def test_a_row_has_the_same_draws_wherever_it_stands(qmc: bool) -> None:
    gaussian, rows = make_gaussian("full", LAYOUTS[0]), inputs(40)
    ready = load_integrator("logit-mc", qmc=qmc).prepare(gaussian, num_samples=16, generator=seeded())  # type: ignore[attr-defined]
    whole = ready.probs_of_draws(gaussian, rows)
    order = torch.randperm(40, generator=seeded(2))
    assert torch.equal(ready.probs_of_draws(gaussian, rows[order]), whole[:, order])
    assert torch.equal(ready.probs_of_draws(gaussian, rows[7:8]), whole[:, 7:8])
    torch.testing.assert_close(ready.probs_of_draws(gaussian, rows.float()), whole, rtol=0, atol=2e-3)  # float16


@pytest.mark.parametrize("qmc", [False, True])
def test_errors_of_examples_are_independent(qmc: bool) -> None:
    """Of 400 examples whose logits differ by 1e-4 alone: the error of their mean is a twentieth of that of each."""
    gaussian = make_gaussian("full", LAYOUTS[0])
    features = inputs(1) + 1e-4 * torch.randn(400, 4, generator=seeded(3), dtype=torch.float64)
    integrator = load_integrator("logit-mc", qmc=qmc)
    of_seeds = [integrator.predict(gaussian, features, num_samples=64, generator=seeded(seed)) for seed in range(30)]
    found = torch.stack([one.probs[:, 0] for one in of_seeds]).double()
    of_each, of_mean = found.std(), found.mean(dim=1).std()
    assert of_mean < 1.4 * of_each / 20  # 30 values: 1.4 is three standard errors of their standard deviation


def test_a_single_logit_agrees_with_quadrature() -> None:
    gaussian = make_gaussian("full", LAYOUTS[2])
    found, exact = (
        load_integrator(name, **settings).predict(gaussian, inputs(), num_samples=2**17, generator=seeded())
        for name, settings in (("logit-mc", {"qmc": True}), ("quadrature", {}))
    )
    torch.testing.assert_close(found.probs, exact.probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mutual_info, exact.mutual_info, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.interval, exact.interval, atol=5e-4, rtol=0)


def test_a_point_is_predicted_by_its_softmax() -> None:
    point = Point(torch.randn(15, generator=seeded()), LAYOUTS[0])
    found = load_integrator("logit-mc").predict(point, inputs(dtype=torch.float32), num_samples=3, generator=seeded())
    expected = load_integrator("plug-in").predict(point, inputs(dtype=torch.float32), num_samples=0, generator=seeded())
    torch.testing.assert_close(found.probs, expected.probs)


def test_a_covariance_that_is_not_finite_is_an_error() -> None:
    gaussian = make_gaussian("full", LAYOUTS[0])
    scale = torch.full_like(gaussian.covariance.scale_tril, math.nan)  # type: ignore[attr-defined]
    broken = replace(gaussian, covariance=replace(gaussian.covariance, scale_tril=scale))  # type: ignore[type-var]
    with pytest.raises(NumericError, match="6 of 6 examples"):
        load_integrator("logit-mc").predict(broken, inputs(), num_samples=3, generator=seeded())


def test_draws_without_a_distribution_of_logits_are_refused() -> None:
    posterior = Samples(torch.zeros(1, 4, 15), LAYOUTS[0])
    with pytest.raises(UsageError, match="logit-mc needs a posterior with logit_root; a samples posterior has none"):
        load_integrator("logit-mc").predict(posterior, inputs(), num_samples=3, generator=seeded())


K, N, D = 3, 70, 4


class Wide(nn.Module):
    """So many numbers an example that a block of logits has room for none; counts the examples that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, K)
        self.blocks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.blocks.append(len(x))
        return self.last(x.repeat(1, 2**17).tanh()[:, :D])


def make() -> tuple[Wide, Gaussian, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Wide().eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=K, input_shape=(D,))
    assert layout.widest >= 2**19
    spread = torch.full((layout.num_params,), 4.0, dtype=torch.float64)
    module.blocks.clear()
    return module, Gaussian(layout.trained(), Diag(spread), layout), torch.randn(N, D, generator=seeded(1))


@pytest.mark.parametrize("task", ["plug-in", "scores"])
def test_one_pass_is_of_many_examples(task: str) -> None:
    module, gaussian, features = make()
    if task == "plug-in":
        load_integrator("plug-in").predict(gaussian, features, num_samples=None, generator=seeded(0))
    else:
        energy_and_max_logit(features, gaussian.mean, gaussian.layout)
    assert module.blocks == [64, 6]


def test_draws_of_logits_take_no_pass_each_and_no_example_again() -> None:
    module, gaussian, features = make()
    mean, covariance = gaussian.logit_moments(features)
    module.blocks.clear()
    found = load_integrator("logit-mc").predict(gaussian, features, num_samples=256, generator=seeded(0))
    assert sum(module.blocks) == 2 * N  # for the mean, and for the derivatives
    assert (found.probs.argmax(dim=1) != mean.argmax(dim=1)).any()  # of which a guess of the class fails
    noise = torch.randn(5_000, N, K, generator=seeded(2))
    expected = (mean + noise * covariance.diagonal(dim1=1, dim2=2).sqrt()).softmax(dim=2).mean(dim=0)
    torch.testing.assert_close(found.probs, expected, atol=0.13, rtol=0)  # four standard errors
