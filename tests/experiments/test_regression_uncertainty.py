"""A regression network's uncertainty: of a network without hidden layers against Bayesian linear regression, of others against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from bnncli.experiments._toy_networks import TanhLayout, ToyTarget, draw_chains, fit_laplace, linearised
from bnncli.experiments.regression_uncertainty import draw, examples, log_density, measure, regression_target
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT

SETTINGS = {
    "examples": 30, "noise": 0.3, "hidden": 2, "prior": 1.0, "draws": 400, "chains": 4, "hmc_draws": 40, "repeats": 1,
}  # fmt: skip


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def linear_target() -> tuple[ToyTarget, torch.Tensor]:
    """Without a hidden layer; with its inputs and a column of ones (N, 2)."""
    x, y = examples(30, 0.3, generator())
    target = ToyTarget(x, TanhLayout((1, 1)), Prior(2.0), lambda outputs: log_density(outputs, y, 0.3).sum(dim=1))
    return target, torch.cat([x, torch.ones_like(x)], dim=1)


def test_the_laplace_approximation_of_a_linear_network_is_its_posterior() -> None:
    target, design = linear_target()
    _, y = examples(30, 0.3, generator())
    precision = design.T @ design / 0.09 + 2 * torch.eye(2)
    gaussian = fit_laplace(target, generator())
    torch.testing.assert_close(gaussian.mean, torch.linalg.solve(precision, design.T @ y / 0.09))
    mean, covariance = linearised(gaussian, target.inputs)
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
    x, y = examples(30, 0.3, generator())
    target = regression_target(x, y, SETTINGS)
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
    measured = measure(SETTINGS, {}, generator=generator(), progress=SILENT)
    values = {name: one.value for name, one in measured.values.items()}
    assert values["gap"] == pytest.approx(values["error_mc"] - values["error_linear"])
    apart = abs(torch.from_numpy(measured.arrays["sd mc"] / measured.arrays["sd linear"]).log()).mean()
    assert values["difference"] == pytest.approx(float(apart))
    assert values["nll_linear"] < 0.5 * math.log(2 * math.pi) + 2
    figure = draw(measured, SETTINGS)["functions"]
    assert [axes.get_title() for axes in figure.axes] == ["Monte Carlo, 400 draws", "linearised", "HMC"]
