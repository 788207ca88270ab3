"""Toy experiments of the refinement paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bnncli.evaluation.comparison import Estimate
from bnncli.papers import refinement_toys
from bnncli.papers.figures import contour_levels, kernel_density
from bnncli.papers.recipe import Measurements
from bnncli.papers.refinement_toys import (
    TanhLayout,
    ToyTarget,
    draw_chains,
    draw_confidence_map,
    draw_integral_errors,
    draw_logistic_posterior,
    draw_regression_uncertainty,
    exact_posterior,
    fit_laplace,
    linear_probs,
    linearise,
    log_density,
    map_examples,
    mean_probs,
    measure_confidence_map,
    measure_integral_errors,
    measure_logistic_posterior,
    measure_regression_uncertainty,
    measure_repeats,
    regression_examples,
    regression_target,
    skewness,
    toy_target,
)
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT


def data_sets() -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    for number in range(3):
        yield {"a": float(number), "r_hat": float(number)}, {"x": number}


def test_numbers_are_of_every_data_set_and_arrays_of_the_first() -> None:
    each = data_sets()
    found, arrays = measure_repeats(lambda: next(each), 3, SILENT.task("x", 3))
    assert found == {"a": Estimate(1.0, 1 / 3**0.5, 3), "r_hat": Estimate(2.0)}
    assert arrays == {"x": 0}


@pytest.mark.parametrize("widths", [(2, 3), (1, 8, 1), (2, 5, 4, 3)])
@pytest.mark.parametrize("prior", [Prior(1.5), Prior(1.5, 0.25)])
def test_the_gradient_of_the_log_joint_is_that_of_autograd(widths: tuple[int, ...], prior: Prior) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = TanhLayout(widths)
    inputs = torch.randn(7, widths[0], generator=generator, dtype=torch.float64)
    target = ToyTarget(inputs, layout, prior, lambda outputs: -outputs.logsumexp(dim=2).square().sum(dim=1))
    theta = torch.randn(4, layout.num_params, generator=generator, dtype=torch.float64, requires_grad=True)
    value = target.log_joint(theta)
    (expected,) = torch.autograd.grad(value.sum(), theta)
    found = target.log_joint_and_grad(theta)
    torch.testing.assert_close(found[0], value.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], expected, rtol=1e-11, atol=1e-12)


INTEGRALS = {"limit": 4.0, "cells": 40, "samples": [100, 400], "repeats": 8}


@pytest.fixture(scope="module")
def measured_integral_errors() -> Measurements:
    return measure_integral_errors(INTEGRALS, {}, generator=torch.Generator().manual_seed(3), progress=SILENT)


def test_probit_errs_by_less_than_its_supremum(measured_integral_errors: Measurements) -> None:
    assert 0.005 < measured_integral_errors.values["probit_max"].value < 0.0178


def test_monte_carlo_has_half_the_error_with_four_times_the_draws(measured_integral_errors: Measurements) -> None:
    few, many = (measured_integral_errors.values[f"mc_mean_{count}"] for count in (100, 400))
    assert few.value / many.value == pytest.approx(2, abs=0.1)
    assert few.count == 8


def test_the_mean_error_is_that_of_a_normal_mean(measured_integral_errors: Measurements) -> None:
    """E|error| = sqrt(2 / pi) sd / sqrt(S) in each cell, with the sd of sigma(f) by quadrature."""
    means, sds = (torch.from_numpy(measured_integral_errors.arrays[name]) for name in ("means", "sds"))
    nodes = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weights = torch.softmax(-(nodes**2) / 2, dim=0)
    probs = torch.sigmoid(means[None, :, None] + sds[:, None, None] * nodes)
    variance = (probs**2 @ weights) - (probs @ weights) ** 2
    expected = float((variance.clamp_min(0) * 2 / math.pi / 100).sqrt().mean())
    assert measured_integral_errors.values["mc_mean_100"].value == pytest.approx(expected, rel=0.03)


def test_maps_are_drawn_with_their_largest_errors(measured_integral_errors: Measurements) -> None:
    figure = draw_integral_errors(measured_integral_errors, INTEGRALS)["errors"]
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert [title.split("\n")[0] for title in titles] == ["probit", "mc 100", "mc 400"]
    assert f"largest {measured_integral_errors.arrays['probit'].max():.2g}" in titles[0]


REGRESSION = {
    "examples": 30, "noise": 0.3, "hidden": 2, "prior": 1.0, "draws": 400, "chains": 4, "hmc_draws": 40, "repeats": 1,
}  # fmt: skip


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def linear_target() -> tuple[ToyTarget, torch.Tensor]:
    """Without a hidden layer; with its inputs and a column of ones (N, 2)."""
    x, y = regression_examples(30, 0.3, generator())
    target = ToyTarget(x, TanhLayout((1, 1)), Prior(2.0), lambda outputs: log_density(outputs, y, 0.3).sum(dim=1))
    return target, torch.cat([x, torch.ones_like(x)], dim=1)


def test_the_laplace_approximation_of_a_linear_network_is_its_posterior() -> None:
    target, design = linear_target()
    _, y = regression_examples(30, 0.3, generator())
    precision = design.T @ design / 0.09 + 2 * torch.eye(2)
    gaussian = fit_laplace(target, generator())
    torch.testing.assert_close(gaussian.mean, torch.linalg.solve(precision, design.T @ y / 0.09))
    mean, covariance = linearise(gaussian, target.inputs)
    torch.testing.assert_close(mean[:, 0], design @ gaussian.mean)
    torch.testing.assert_close(covariance[:, 0, 0], (design @ precision.inverse() * design).sum(dim=1))


def test_hmc_draws_from_the_posterior_of_a_linear_network() -> None:
    target, _ = linear_target()
    gaussian = fit_laplace(target, generator())
    draws = draw_chains(target, gaussian, generator(), num_chains=8, num_draws=200).flatten(0, 1)
    white = gaussian.covariance.whiten(draws - gaussian.mean)
    torch.testing.assert_close(white.T.cov(), torch.eye(2).double(), atol=0.15, rtol=0)
    assert white.mean(dim=0).abs().max() < 0.15


def test_outputs_are_those_of_linear_layers_with_tanh_between_them() -> None:
    layout = TanhLayout((2, 3, 4, 1))
    network = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()
    theta = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    inputs = torch.randn(5, 2, generator=generator(), dtype=torch.float64)
    found = layout.outputs(inputs, torch.stack([0 * theta, theta]))
    torch.testing.assert_close(found[1], network(inputs).detach())
    assert len(theta) == layout.num_params


def test_the_mode_of_a_network_with_a_hidden_layer_has_no_slope_and_its_precision_is_minus_the_curvature() -> None:
    x, y = regression_examples(30, 0.3, generator())
    target = regression_target(x, y, REGRESSION)
    gaussian = fit_laplace(target, generator())
    assert target.log_joint_and_grad(gaussian.mean.unsqueeze(0))[1].abs().max() < 1e-4
    direction = torch.randn(target.layout.num_params, generator=generator(), dtype=torch.float64)
    step = 1e-4 * direction
    up, at, down = target.log_joint(torch.stack([gaussian.mean + step, gaussian.mean, gaussian.mean - step])).tolist()
    curvature = float(direction @ target.precision(gaussian.mean) @ direction)
    assert -(up - 2 * at + down) / 1e-8 == pytest.approx(curvature, rel=1e-3)


def test_densities_are_normal() -> None:
    outputs, labels = torch.tensor([[[0.5], [-1.0]]]).double(), torch.tensor([0.0, 1.0]).double()
    expected = stats.norm.logpdf([0.0, 1.0], loc=[0.5, -1.0], scale=0.3)
    assert log_density(outputs, labels, 0.3)[0].tolist() == pytest.approx(expected.tolist())


def test_what_is_measured_is_drawn() -> None:
    measured_regression_uncertainty = measure_regression_uncertainty(
        REGRESSION, {}, generator=generator(), progress=SILENT
    )
    values = {name: one.value for name, one in measured_regression_uncertainty.values.items()}
    assert values["gap"] == pytest.approx(values["error_mc"] - values["error_linear"])
    apart = abs(
        torch.from_numpy(
            measured_regression_uncertainty.arrays["sd mc"] / measured_regression_uncertainty.arrays["sd linear"]
        ).log()
    ).mean()
    assert values["difference"] == pytest.approx(float(apart))
    assert values["nll_linear"] < 0.5 * math.log(2 * math.pi) + 2
    figure = draw_regression_uncertainty(measured_regression_uncertainty, REGRESSION)["functions"]
    assert [axes.get_title() for axes in figure.axes] == ["Monte Carlo, 400 draws", "linearised", "HMC"]


MAP = {
    "examples": 30, "spread": 0.5, "hidden": 2, "prior": 1.0, "draws": 200, "chains": 4, "hmc_draws": 30, "repeats": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured_confidence_map() -> Measurements:
    return measure_confidence_map(MAP, {}, generator=torch.Generator().manual_seed(2), progress=SILENT)


def test_classes_lie_around_the_corners_of_a_triangle() -> None:
    x, labels = map_examples(30_000, 0.6, torch.Generator().manual_seed(0))
    expected = torch.tensor([[2.0, 0.0], [-1.0, 3**0.5], [-1.0, -(3**0.5)]]).double()
    for label, center in enumerate(expected):
        own = x[labels == label]
        torch.testing.assert_close(own.mean(dim=0), center, atol=0.03, rtol=0)
        torch.testing.assert_close(own.T.cov(), 0.36 * torch.eye(2).double(), atol=0.02, rtol=0)


def test_mean_probabilities_are_averages_over_theta() -> None:
    layout, generator = TanhLayout((2, 3, 3)), torch.Generator().manual_seed(1)
    theta = torch.randn(7, layout.num_params, generator=generator, dtype=torch.float64)
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    expected = sum(layout.outputs(inputs, one.unsqueeze(0))[0].softmax(dim=1) for one in theta) / 7
    torch.testing.assert_close(mean_probs(layout, inputs, theta), expected)


def test_linear_probabilities_are_those_of_normal_logits() -> None:
    root = torch.tensor([[1.0, 0.0, 0.0], [-0.8, 0.5, 0.0], [0.3, 0.2, 0.9]]).double()
    mean, covariance = torch.tensor([[1.0, 0.0, -1.0]]).double(), (root @ root.T).unsqueeze(0)
    found = linear_probs(mean, covariance, 200_000, torch.Generator().manual_seed(1))
    normal = torch.distributions.MultivariateNormal(mean[0], covariance[0])
    expected = normal.sample((200_000,)).softmax(dim=1).mean(dim=0, keepdim=True)
    torch.testing.assert_close(found, expected, atol=0.005, rtol=0)


def test_gaps_are_differences_and_confidence_is_that_of_the_maps(measured_confidence_map: Measurements) -> None:
    values = {name: one.value for name, one in measured_confidence_map.values.items()}
    assert values["gap_mc_mpa"] == pytest.approx(values["near_mc"] - values["near_mpa"])
    assert values["gap_error"] == pytest.approx(values["error_mc"] - values["error_mpa"])
    one, hmc = measured_confidence_map.arrays["map mpa"], measured_confidence_map.arrays["map hmc"]
    assert values["error_mpa"] == pytest.approx(np.abs(one - hmc).mean())
    rim = np.concatenate([one[0], one[-1], one[1:-1, 0], one[1:-1, -1]])
    assert values["far_mpa"] == pytest.approx(rim.mean())
    assert values["near_plug"] > values["near_mpa"]


def test_maps_are_drawn_with_their_confidence_at_the_examples(measured_confidence_map: Measurements) -> None:
    figure = draw_confidence_map(measured_confidence_map, MAP)["confidence"]
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert [title.split("\n")[0] for title in titles] == ["Monte Carlo", "multi-class probit", "HMC"]
    assert f"{measured_confidence_map.values['near_mc'].value:.2f} at the examples" in titles[0]


LOGISTIC = {
    "examples": 50, "center": [2.0, 2.0], "prior": 0.1, "lengths": [1], "epochs": 300, "num_draws": 16, "learning_rate": 0.03,
    "draws": 400, "repeats": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured_logistic_posterior() -> Measurements:
    return measure_logistic_posterior(LOGISTIC, {}, generator=torch.Generator().manual_seed(3), progress=SILENT)


def test_the_evidence_is_that_of_adaptive_quadrature_of_a_posterior_by_hand() -> None:
    target = toy_target(LOGISTIC, torch.Generator().manual_seed(1))
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


def test_the_best_gaussian_is_below_laplace_and_the_factorised_one_in_divergence(
    measured_logistic_posterior: Measurements,
) -> None:
    values = {name: found.value for name, found in measured_logistic_posterior.values.items()}
    assert 0 < values["kl_vb"] < min(values["kl_la"], values["kl_factorised"])
    assert 0 < values["kl_r1"] < values["kl_la"]
    assert values["kl_gap_la_vb"] == pytest.approx(values["kl_la"] - values["kl_vb"])


def test_hmc_is_the_posterior_on_the_grid_and_the_grid_is_fine_enough(
    measured_logistic_posterior: Measurements,
) -> None:
    assert measured_logistic_posterior.values["mean_hmc"].value < 5 * math.sqrt(2 / LOGISTIC["draws"])
    assert abs(measured_logistic_posterior.values["mmd_again"].value) < 0.01
    assert measured_logistic_posterior.values["evidence_error"].value < 1e-4


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


def test_a_panel_is_drawn_for_each_approximation(measured_logistic_posterior: Measurements) -> None:
    figure = draw_logistic_posterior(measured_logistic_posterior, LOGISTIC)["contours"]
    titles = [axes.get_title().split("\n")[0] for axes in figure.axes if axes.get_visible()]
    assert titles == ["Laplace", "factorised Gaussian", "best Gaussian", "refined, 1 layer", "HMC"]


def test_times_are_means_and_increases_are_taken_within_a_repeat() -> None:
    found = refinement_toys.summarize_times({2: [1.0, 2.0], 4: [2.0, 3.0]})
    assert found["seconds_2"] == Estimate(1.5, 0.5, 2)
    assert found["seconds_4"] == Estimate(2.5, 0.5, 2)
    assert found["increase_2_4"] == Estimate(75.0, 25.0, 2)


def test_every_length_is_timed_and_drawn() -> None:
    settings = {"lengths": [2, 4], "steps": 3, "repeats": 2}
    found = refinement_toys.measure_flow_time(settings, {}, generator=generator(), progress=SILENT)
    assert all(found.values[f"seconds_{length}"].value > 0 for length in (2, 4))
    (axes,) = refinement_toys.draw_flow_time(found, settings)["time"].axes
    assert axes.lines[0].get_ydata().tolist() == [1e3 * found.values[f"seconds_{length}"].value for length in (2, 4)]
