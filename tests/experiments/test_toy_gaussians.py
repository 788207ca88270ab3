"""The toy of four Gaussians: covariances of logits against dense algebra, and doubts against the Dirichlet's own formulas."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import losses_of, tiny_target
from scipy import stats

from bnncli.experiments import Measurements, toy_gaussians
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT

SETTINGS = {"per_class": 8, "steps": 200, "precision": 1.0, "draws": 50, "repeats": 1}


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return toy_gaussians.measure(SETTINGS, {}, generator=seeded(1), progress=SILENT)


def test_covariances_in_the_space_of_the_data_are_those_of_the_whole_matrix() -> None:
    """H as the sum of J^T (diag p - p p^T) J, inverted as a P x P matrix."""
    target = tiny_target(prior=Prior(0.7))
    theta, inputs = toy_gaussians.parameters(target).double(), torch.randn(6, 4, generator=seeded(9)).double()

    def jacobian(at: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.jacobian(lambda one: target.layout.logits(at, one.unsqueeze(0))[0], theta)

    probs = target.layout.logits(target.inputs, theta.unsqueeze(0))[0].softmax(dim=1)
    fisher = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    derivatives = jacobian(target.inputs)
    precision = torch.einsum("nkp,nkl,nlq->pq", derivatives, fisher, derivatives) + 0.7 * torch.eye(len(theta))
    own = jacobian(inputs)
    expected = own @ torch.linalg.inv(precision) @ own.transpose(1, 2)
    torch.testing.assert_close(toy_gaussians.whole_covariances(target, inputs), expected, rtol=1e-6, atol=1e-9)


def test_training_ends_near_the_mode_of_its_own_target() -> None:
    train, labels = toy_gaussians.points(20, seeded(2))
    target = toy_gaussians.trained(train, labels, {**SETTINGS, "steps": 400}, seeded(3))
    theta = toy_gaussians.parameters(target)
    start = 0.1 * torch.randn(theta.shape, generator=seeded(4))
    found, other = target.log_joint(torch.stack([theta, start])).tolist()
    assert float(losses_of(target, theta).mean()) < 0.1
    assert found > other
    gradient = target.log_joint_and_grad(theta.unsqueeze(0))[1]
    assert float(gradient.norm()) < 0.2 * float(target.log_joint_and_grad(start.unsqueeze(0))[1].norm())


def test_doubts_of_the_bridge_are_those_of_its_dirichlet() -> None:
    mean, variances = torch.tensor([[2.0, 0.5, -1.0, 0.0]]).double(), torch.tensor([[0.5, 1.0, 2.0, 0.7]]).double()
    found = toy_gaussians._of_bridge(mean, torch.diag_embed(variances))
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


def test_gains_are_differences_of_areas_and_every_map_is_drawn(measured: Measurements) -> None:
    values = measured.values
    gain = values["auroc_exact"].value - values["auroc_kron"].value
    assert values["gain_exact_over_kron"].value == pytest.approx(gain)
    figure = toy_gaussians.draw(measured, SETTINGS)["uncertainty"]
    assert sum("AUROC" in axes.get_title() for axes in figure.axes) == 8
