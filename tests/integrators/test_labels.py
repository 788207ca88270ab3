"""Several labels an example: what every integrator predicts is what it predicts of each label by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy import stats
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.evaluation.detectors import DETECTORS
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import Prediction, entropy, load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.likelihoods import MULTILABEL
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
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
    ("name", "settings"),
    [("mc", {}), ("mc", {"qmc": True}), ("logit-mc", {})],
    ids=["mc", "qmc", "logit-mc"],
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
    assert found.mutual_info is not None
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
    assert values is not None
    of_predictions = DETECTORS["dirichlet_variance"].of_predictions
    assert of_predictions is not None
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
