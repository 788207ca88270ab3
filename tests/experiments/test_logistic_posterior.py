"""Approximations of a posterior of two weights: the grid against quadrature and moments against samples, and what must be true of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bnncli.experiments import Measurements
from bnncli.experiments.logistic_posterior import draw, exact_posterior, measure, skewness, toy_target
from bnncli.figures.contours import contour_levels, kernel_density
from bnncli.progress import SILENT

SETTINGS = {
    "examples": 50, "center": [2.0, 2.0], "prior": 0.1, "lengths": [1], "epochs": 300, "num_draws": 16, "learning_rate": 0.03,
    "draws": 400, "repeats": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(SETTINGS, {}, generator=torch.Generator().manual_seed(3), progress=SILENT)


def test_the_evidence_is_that_of_adaptive_quadrature_of_a_posterior_by_hand() -> None:
    target = toy_target(SETTINGS, torch.Generator().manual_seed(1))
    features, signs = target.features.numpy(), 2 * target.labels.numpy() - 1

    def density(second: float, first: float) -> float:
        weights = np.array([first, second])
        log_likelihood = -np.logaddexp(0, -signs * (features @ weights)).sum()
        return float(np.exp(log_likelihood + stats.norm.logpdf(weights, scale=math.sqrt(10)).sum()))

    expected = integrate.dblquad(density, -4, 12, -4, 12, epsabs=1e-14, epsrel=1e-5)[0]
    exact = exact_posterior(target, torch.tensor([[-1.0, -1.0], [5.0, 5.0]]))
    assert exact.log_evidence == pytest.approx(math.log(expected), abs=1e-3)


def test_skewness_is_that_of_a_gamma_variable() -> None:
    points = torch.zeros(2000, 2).double()
    points[:, 1] = torch.linspace(0.01, 40, 2000)
    shares = torch.from_numpy(stats.gamma(4).pdf(points[:, 1].numpy()))
    assert skewness(points, shares / shares.sum(), torch.tensor([0.0, 1.0]).double()) == pytest.approx(1, abs=1e-3)


def test_the_best_gaussian_is_below_laplace_and_the_factorised_one_in_divergence(measured: Measurements) -> None:
    values = {name: found.value for name, found in measured.values.items()}
    assert 0 < values["kl_vb"] < min(values["kl_la"], values["kl_factorised"])
    assert 0 < values["kl_r1"] < values["kl_la"]
    assert values["kl_gap_la_vb"] == pytest.approx(values["kl_la"] - values["kl_vb"])


def test_hmc_is_the_posterior_on_the_grid_and_the_grid_is_fine_enough(measured: Measurements) -> None:
    assert measured.values["mean_hmc"].value < 5 * math.sqrt(2 / SETTINGS["draws"])
    assert abs(measured.values["mmd_again"].value) < 0.01
    assert measured.values["evidence_error"].value < 1e-4


def test_contours_hold_the_shares_that_they_say() -> None:
    draws = np.random.default_rng(0).normal(size=(20_000, 2))
    axis = np.linspace(-5, 5, 201)
    across, up = np.meshgrid(axis, axis)
    density = np.exp(-(across**2 + up**2) / 2)
    expected = [
        1 - share for share in (0.95, 0.8, 0.5, 0.2)
    ]  # of a standard normal, exp(-r^2 / 2) is 1 minus what a disc holds
    assert contour_levels(density) == pytest.approx(expected, abs=0.005)
    smooth = kernel_density(draws, np.array([0.0, 1.0]), np.array([0.0]))
    assert smooth[0] == pytest.approx([1 / (2 * np.pi), np.exp(-0.5) / (2 * np.pi)], rel=0.07)


def test_a_panel_is_drawn_for_each_approximation(measured: Measurements) -> None:
    figure = draw(measured, SETTINGS)["contours"]
    titles = [axes.get_title().split("\n")[0] for axes in figure.axes if axes.get_visible()]
    assert titles == ["Laplace", "factorised Gaussian", "best Gaussian", "refined, 1 layer", "HMC"]
