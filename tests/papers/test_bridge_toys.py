"""Toy experiments of the Laplace bridge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import losses_of, tiny_target
from scipy import integrate, stats

from bnncli.commands.demo import fixture_path
from bnncli.numerics import dirichlet
from bnncli.papers import bridge_toys
from bnncli.papers.bridge_toys import (
    GAUSSIANS,
    append_one,
    bridge_shares,
    build_vertices,
    compute_curves,
    compute_kl,
    dirichlet_shares,
    draw_overlapping_classes,
    draw_simplex_densities,
    find_crossing,
    mean_curvature,
    measure_beta,
    measure_lengths,
    measure_overlapping_classes,
    measure_simplex_densities,
    project_moments,
    sample_shares,
    to_gaussian,
    weights,
)
from bnncli.papers.recipe import Measurements
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT


def test_a_triangle_halved_five_times_has_561_vertices() -> None:
    points = build_vertices(5)
    assert points.shape == (561, 3)
    assert points.min() == 1e-3
    assert len(np.unique(points, axis=0)) == 561


def test_samples_count_at_their_nearest_vertex() -> None:
    mean, covariance = torch.tensor([2.0, 0.0, 1.0]).double(), 1e-12 * torch.eye(3).double()
    points = build_vertices(3)
    shares = sample_shares(mean, covariance, points, 50, torch.Generator().manual_seed(0))
    nearest = np.linalg.norm(points - mean.softmax(0).numpy(), axis=1).argmin()
    assert shares[nearest] == 1
    assert shares.sum() == 1


def test_the_bridge_has_the_density_of_its_dirichlet_at_the_vertices() -> None:
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in GAUSSIANS[1])
    points = build_vertices(3) / build_vertices(3).sum(axis=1, keepdims=True)
    alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None]).exp()[0].numpy()
    expected = np.array([stats.dirichlet.pdf(point, alpha) for point in points])
    np.testing.assert_allclose(bridge_shares(mean, covariance, points), expected / expected.sum(), rtol=1e-9)


def test_projected_moments_are_those_of_logits_minus_their_mean() -> None:
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in GAUSSIANS[2])
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((200_000,))
    centred = draws - draws.mean(dim=1, keepdim=True)
    found_mean, found_covariance = project_moments(mean, covariance)
    torch.testing.assert_close(centred.mean(dim=0), found_mean, atol=0.02, rtol=0)
    torch.testing.assert_close(centred.T.cov(), found_covariance, atol=0.03, rtol=0)


def test_divergence_is_zero_of_equal_shares_and_a_sum_by_hand_of_others() -> None:
    one, other = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.5, 0.25])
    assert compute_kl(one, one) == 0
    assert compute_kl(one, other) == pytest.approx(0.5 * np.log(2), abs=1e-12)


def test_a_power_law_crosses_its_level_where_it_should() -> None:
    sizes = [10, 100, 1000]
    assert find_crossing(sizes, [1 / size for size in sizes], 1 / 250) == pytest.approx(250)
    assert find_crossing(sizes, [0.1, 0.01, 0.001], 0.5) == 10
    assert find_crossing(sizes, [0.1, 0.01, 0.001], 1e-5) == 1000


def test_samples_have_the_covariance_that_was_asked_for() -> None:
    mean, covariance = torch.zeros(3).double(), torch.tensor(GAUSSIANS[2][1], dtype=torch.float64)
    points = build_vertices(5)
    shares = sample_shares(mean, covariance, points, 100_000, torch.Generator().manual_seed(0))
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((100_000,)).softmax(dim=1).numpy()
    np.testing.assert_allclose(shares @ points**2, (draws**2).mean(axis=0), atol=0.005)


DENSITIES = {"samples": 20000}


@pytest.fixture(scope="module")
def measured_simplex_densities() -> Measurements:
    return measure_simplex_densities(DENSITIES, {}, generator=seeded(0), progress=SILENT)


def test_the_gaussian_of_a_dirichlet_is_brought_back_to_it() -> None:
    mean, covariance = to_gaussian((2.0, 0.7, 6.0))
    log_alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None])
    torch.testing.assert_close(log_alpha.exp()[0], torch.tensor([2.0, 0.7, 6.0]).double())
    expected = torch.linalg.pinv(torch.diag(log_alpha.exp()[0]) - torch.outer(*[log_alpha.exp()[0]] * 2) / 8.7)
    torch.testing.assert_close(covariance, expected)


def test_shares_of_a_dirichlet_have_its_mean() -> None:
    points = build_vertices(5)
    shares = dirichlet_shares(np.array([2.0, 3.0, 5.0]), points, 100_000, seeded(1))
    np.testing.assert_allclose(shares @ points, [0.2, 0.3, 0.5], atol=0.005)


def test_distances_in_both_bases_are_those_of_quadrature() -> None:
    found = measure_beta(2.0, 3.0)
    beta, gaussian = stats.beta(2, 3), stats.norm(1 / 3, (1 / (1 / 9) + 2 / (4 / 9)) ** -0.5)
    # Kinks of |p - q| at the crossings make quad slow, not wrong.
    gap = integrate.quad(lambda x: abs(beta.pdf(x) - gaussian.pdf(x)), -2, 3, limit=500, points=[0, 1])[0] / 2
    assert found["tv_standard"] == pytest.approx(gap, abs=1e-4)
    assert found["outside"] == pytest.approx(gaussian.cdf(0) + gaussian.sf(1), rel=1e-9)
    assert found["integral"] == pytest.approx(1, abs=1e-4)


def test_the_softmax_basis_has_the_density_of_the_logit() -> None:
    panel = compute_curves(6.0, 2.0)[1]
    probs = 1 / (1 + np.exp(-panel["x"]))
    np.testing.assert_allclose(panel["own"], stats.beta(6, 2).pdf(probs) * probs * (1 - probs), rtol=1e-9)
    place = panel["own"].argmax()
    assert panel["own"][place] == pytest.approx(panel["approximation"][place], rel=0.05)


def test_a_beta_without_a_mode_has_no_approximation_in_the_standard_basis() -> None:
    assert "tv_standard" not in measure_beta(0.8, 0.7)
    assert compute_curves(0.8, 0.7)[0]["approximation"] is None


def test_figure_1_1_has_equal_modes_and_other_means(measured_simplex_densities: Measurements) -> None:
    assert measured_simplex_densities.values["mode_shift"].value == pytest.approx(0, abs=1e-12)
    assert measured_simplex_densities.values["mean_shift"].value == pytest.approx(51 / 73 - 0.6)


def test_spreads_are_those_of_samples_and_of_the_dirichlet(measured_simplex_densities: Measurements) -> None:
    mean = torch.tensor([2.0, -1.0, -1.0]).double()
    draws = (mean + torch.randn(200_000, 3, generator=seeded(5)).double() * 2).softmax(dim=1)
    assert measured_simplex_densities.values["spread_truth_400"].value == pytest.approx(
        float(draws.var(dim=0).sum()), rel=0.03
    )
    alpha = dirichlet.from_gaussian(mean[None], torch.full((1, 3), 4.0)).exp()[0].numpy()
    assert measured_simplex_densities.values["spread_bridge_400"].value == pytest.approx(
        stats.dirichlet(alpha).var().sum(), rel=1e-6
    )


def test_there_is_a_triangle_for_each_way_and_distribution(measured_simplex_densities: Measurements) -> None:
    figures = draw_simplex_densities(measured_simplex_densities, DENSITIES)
    assert len(figures["triangles"].axes) == 3 * 5
    assert len(figures["bases"].axes) == 3


GAUSSIANS_SETTINGS = {"per_class": 8, "steps": 200, "precision": 1.0, "draws": 50, "repeats": 1}


@pytest.fixture(scope="module")
def measured_toy_gaussians() -> Measurements:
    return bridge_toys.measure_toy_gaussians(GAUSSIANS_SETTINGS, {}, generator=seeded(1), progress=SILENT)


def test_covariances_in_the_space_of_the_data_are_those_of_the_whole_matrix() -> None:
    """H as the sum of J^T (diag p - p p^T) J, inverted as a P x P matrix."""
    target = tiny_target(prior=Prior(0.7))
    theta, inputs = weights(target).double(), torch.randn(6, 4, generator=seeded(9)).double()

    def jacobian(at: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.jacobian(lambda one: target.layout.logits(at, one.unsqueeze(0))[0], theta)

    probs = target.layout.logits(target.inputs, theta.unsqueeze(0))[0].softmax(dim=1)
    fisher = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    derivatives = jacobian(target.inputs)
    precision = torch.einsum("nkp,nkl,nlq->pq", derivatives, fisher, derivatives) + 0.7 * torch.eye(len(theta))
    own = jacobian(inputs)
    expected = own @ torch.linalg.inv(precision) @ own.transpose(1, 2)
    torch.testing.assert_close(bridge_toys.compute_covariances(target, inputs), expected, rtol=1e-6, atol=1e-9)


def test_training_ends_near_the_mode_of_its_own_target() -> None:
    train, labels = bridge_toys.draw_points(20, seeded(2))
    target = bridge_toys.train_network(train, labels, {**GAUSSIANS_SETTINGS, "steps": 400}, seeded(3))
    theta = weights(target)
    start = 0.1 * torch.randn(theta.shape, generator=seeded(4))
    found, other = target.log_joint(torch.stack([theta, start])).tolist()
    assert float(losses_of(target, theta).mean()) < 0.1
    assert found > other
    gradient = target.log_joint_and_grad(theta.unsqueeze(0))[1]
    assert float(gradient.norm()) < 0.2 * float(target.log_joint_and_grad(start.unsqueeze(0))[1].norm())


def test_doubts_of_the_bridge_are_those_of_its_dirichlet() -> None:
    mean, variances = torch.tensor([[2.0, 0.5, -1.0, 0.0]]).double(), torch.tensor([[0.5, 1.0, 2.0, 0.7]]).double()
    found = bridge_toys.compute_bridge_uncertainties(mean, torch.diag_embed(variances))
    m, v = mean[0].numpy(), variances[0].numpy()
    alpha = [
        (1 - 2 / 4 + torch.exp(mean[0])[k].item() / 16 * sum(2.718281828459045**-one for one in m)) / v[k]
        for k in range(4)
    ]
    dirichlet = stats.dirichlet(alpha)
    assert float(found["bridge_variance"]) == pytest.approx(dirichlet.var()[0], rel=1e-9)
    assert float(found["bridge_entropy"]) == pytest.approx(stats.entropy(dirichlet.mean()), rel=1e-9)
    assert float(found["bridge_weighted"]) == pytest.approx(
        1 - dirichlet.mean()[0] * (1 - 4 * dirichlet.var()[0]), rel=1e-9
    )


def test_gains_are_differences_of_areas_and_every_map_is_drawn(measured_toy_gaussians: Measurements) -> None:
    values = measured_toy_gaussians.values
    gain = values["auroc_exact"].value - values["auroc_kron"].value
    assert values["gain_exact_over_kron"].value == pytest.approx(gain)
    figure = bridge_toys.draw_toy_gaussians(measured_toy_gaussians, GAUSSIANS_SETTINGS)["uncertainty"]
    assert sum("AUROC" in axes.get_title() for axes in figure.axes) == 8


CLASSES = {"variances": [0.5, 100.0], "images": 100}


@pytest.fixture(scope="module")
def measured_overlapping_classes() -> Measurements:
    names = {"net": "lenet5-fmnist.pt", "train": "val.npz", "test": "test.npz"}
    inputs: dict[str, Path] = {key: fixture_path(name) for key, name in names.items()}
    return measure_overlapping_classes(CLASSES, inputs, generator=torch.Generator(), progress=SILENT)


def test_the_curvature_is_the_diagonal_of_the_mean_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = append_one(torch.randn(7, 3, generator=generator))
    head = torch.randn(4, 4, generator=generator, dtype=torch.float64)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return (inner @ flat.reshape(4, 4).T).logsumexp(dim=1).mean()

    hessian = torch.autograd.functional.hessian(loss, head.flatten())
    torch.testing.assert_close(mean_curvature(inner, head).flatten(), hessian.diagonal())


def test_lengths_of_one_rescue_nothing_and_longer_ones_the_labels_within() -> None:
    alpha = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0, 0])
    one = measure_lengths(alpha, alpha, torch.tensor([1, 1, 1]), labels)
    assert [one[name].value for name in ("length", "rescued", "gain", "longer")] == [1, 0, 0, 0]
    two = measure_lengths(alpha, alpha, torch.tensor([2, 1, 1]), labels)
    assert [two[name].value for name in ("length", "rescued", "longer")] == pytest.approx([4 / 3, 1 / 3, 1 / 3])


def test_a_wider_prior_keeps_more_classes_and_the_factor_fewer(measured_overlapping_classes: Measurements) -> None:
    value = {name: one.value for name, one in measured_overlapping_classes.values.items()}
    assert value["length_100000_neighbor"] >= value["length_500_neighbor"] >= value["length_500_neighbor_right"] >= 1
    assert value["length_500_best"] <= value["length_500_neighbor"]
    assert 0.5 < value["confidence_500"] < 1.5


def test_the_figure_has_the_shares_of_all_images(measured_overlapping_classes: Measurements) -> None:
    figure = draw_overlapping_classes(measured_overlapping_classes, CLASSES)["lengths"]
    assert len(figure.axes) == 2
    for line in figure.axes[0].lines:
        assert float(np.asarray(line.get_ydata()).sum()) == pytest.approx(1)
