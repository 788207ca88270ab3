"""Densities on the simplex: against scipy's Betas and Dirichlets, the round trip of the bridge, and integrals by quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy import integrate, stats

from bnncli.experiments import Measurements
from bnncli.experiments.simplex_densities import curves_of, dirichlet_shares, draw, measure, of_beta, to_gaussian
from bnncli.experiments.simplex_kl import vertices
from bnncli.numerics import dirichlet
from bnncli.progress import SILENT

SETTINGS = {"samples": 20000}


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(SETTINGS, {}, generator=seeded(0), progress=SILENT)


def test_the_gaussian_of_a_dirichlet_is_brought_back_to_it() -> None:
    mean, covariance = to_gaussian((2.0, 0.7, 6.0))
    log_alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None])
    torch.testing.assert_close(log_alpha.exp()[0], torch.tensor([2.0, 0.7, 6.0]).double())
    expected = torch.linalg.pinv(torch.diag(log_alpha.exp()[0]) - torch.outer(*[log_alpha.exp()[0]] * 2) / 8.7)
    torch.testing.assert_close(covariance, expected)


def test_shares_of_a_dirichlet_have_its_mean() -> None:
    points = vertices(5)
    shares = dirichlet_shares(np.array([2.0, 3.0, 5.0]), points, 100_000, seeded(1))
    np.testing.assert_allclose(shares @ points, [0.2, 0.3, 0.5], atol=0.005)


def test_distances_in_both_bases_are_those_of_quadrature() -> None:
    found = of_beta(2.0, 3.0)
    beta, gaussian = stats.beta(2, 3), stats.norm(1 / 3, (1 / (1 / 9) + 2 / (4 / 9)) ** -0.5)
    # Kinks of |p - q| at the crossings make quad slow, not wrong.
    gap = integrate.quad(lambda x: abs(beta.pdf(x) - gaussian.pdf(x)), -2, 3, limit=500, points=[0, 1])[0] / 2
    assert found["tv_standard"] == pytest.approx(gap, abs=1e-4)
    assert found["outside"] == pytest.approx(gaussian.cdf(0) + gaussian.sf(1), rel=1e-9)
    assert found["integral"] == pytest.approx(1, abs=1e-4)


def test_the_softmax_basis_has_the_density_of_the_logit() -> None:
    panel = curves_of(6.0, 2.0)[1]
    probs = 1 / (1 + np.exp(-panel["x"]))
    np.testing.assert_allclose(panel["own"], stats.beta(6, 2).pdf(probs) * probs * (1 - probs), rtol=1e-9)
    place = panel["own"].argmax()
    assert panel["own"][place] == pytest.approx(panel["approximation"][place], rel=0.05)


def test_a_beta_without_a_mode_has_no_approximation_in_the_standard_basis() -> None:
    assert "tv_standard" not in of_beta(0.8, 0.7)
    assert curves_of(0.8, 0.7)[0]["approximation"] is None


def test_figure_1_1_has_equal_modes_and_other_means(measured: Measurements) -> None:
    assert measured.values["mode_shift"].value == pytest.approx(0, abs=1e-12)
    assert measured.values["mean_shift"].value == pytest.approx(51 / 73 - 0.6)


def test_spreads_are_those_of_samples_and_of_the_dirichlet(measured: Measurements) -> None:
    mean = torch.tensor([2.0, -1.0, -1.0]).double()
    draws = (mean + torch.randn(200_000, 3, generator=seeded(5)).double() * 2).softmax(dim=1)
    assert measured.values["spread_truth_400"].value == pytest.approx(float(draws.var(dim=0).sum()), rel=0.03)
    alpha = dirichlet.from_gaussian(mean[None], torch.full((1, 3), 4.0)).exp()[0].numpy()
    assert measured.values["spread_bridge_400"].value == pytest.approx(stats.dirichlet(alpha).var().sum(), rel=1e-6)


def test_there_is_a_triangle_for_each_way_and_distribution(measured: Measurements) -> None:
    figures = draw(measured, SETTINGS)
    assert len(figures["triangles"].axes) == 3 * 5
    assert len(figures["bases"].axes) == 3
