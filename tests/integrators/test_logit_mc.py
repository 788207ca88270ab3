"""Draws of the logits: their exact moments for every structure, and what is predicted from them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems.heads import LAYOUTS, at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli import registry
from bnncli.errors import NumericError, UsageError
from bnncli.integrators import load_integrator
from bnncli.logits import root_of_covariances
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.posteriors.samples import Samples

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
    assert prediction.interval is not None
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
