"""Covariances of a network's logits along prior precisions: interpolated, and by bins of curvature."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.inference.mode import covariance_at
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance, ggn
from bnncli.structures.logit_gaussian import covariances_together, keeps_path, make_path
from bnncli.structures.network_logits import keeping, path_weights
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

NUM_INPUTS, NUM_CLASSES = 12, 3
NODES = np.linspace(math.log(1e-2), math.log(1e5), 15).tolist()


class Convolutions(nn.Module):
    """A convolution with more positions than outputs times classes, a wide one with fewer, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8)
        self.second, self.last = nn.Conv1d(8, 96, 5, stride=3), nn.Linear(96, NUM_CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.second(self.norm(self.first(x).tanh())).tanh().mean(dim=2))


def make_target(rank: int | None = None) -> tuple[Convolutions, NetworkTarget]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Convolutions().eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=NUM_CLASSES, input_shape=(2, 32))
    inputs = torch.randn(NUM_INPUTS, 2, 32, generator=seeded(1))
    labels, choice = torch.arange(NUM_INPUTS) % NUM_CLASSES, CurvatureChoice(rank=rank)
    return module, NetworkTarget(inputs, labels, layout, Prior(1.0), choice=choice)


def covariances_of(
    target: NetworkTarget, structure: str, log_precisions: list[float], bias_precision: float | None = None
) -> list[Covariance]:
    theta = target.layout.trained()
    hessian = ggn(target, theta, structure)
    priors = [Prior(math.exp(one), bias_precision) for one in log_precisions]
    return [covariance_at(target.with_prior(one), theta, structure, hessian=hessian).covariance for one in priors]


def by_jacobian(target: NetworkTarget, covariance: Covariance) -> Tensor:
    """J L L^T J^T with the whole Jacobian, (n, K, K)."""
    rows = target.layout.jacobian(target.inputs, target.layout.trained())
    root = covariance.pull_back(rows.double().flatten(0, 1)).unflatten(0, rows.shape[:2])
    return root @ root.mT


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Largest error of the variance in any direction, relative to the largest variance, (n,)."""
    return torch.linalg.matrix_norm(found - expected, ord=2) / torch.linalg.matrix_norm(expected, ord=2)


def test_weights_have_the_error_that_they_state_for_every_curvature() -> None:
    curvatures = np.concatenate([[0.0], np.geomspace(1e-12, 1e14, 5001)])
    for tau in np.geomspace(1e-2, 1e5, 43):
        weights, error = path_weights(NODES, math.log(tau))
        found = (weights.numpy() / (curvatures[:, None] + np.exp(NODES))).sum(axis=1)
        assert abs(found * (curvatures + tau) - 1).max() <= 1.01 * error + 1e-9
        assert error < 0.01
    assert path_weights(NODES, NODES[4])[0].tolist() == [float(index == 4) for index in range(len(NODES))]


@pytest.mark.parametrize("bias_precision", [None, 0.5])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "block"])
def test_a_path_takes_one_pass_and_agrees_with_the_jacobian(structure: str, bias_precision: float | None) -> None:
    module, target = make_target()
    if structure == "block":  # of the smaller layers, as its blocks are dense
        network, sizes = target.layout.network, {"num_outputs": NUM_CLASSES, "input_shape": (2, 32)}
        layout = ModuleLayout.of(network, "first*+norm*+last*", **sizes)
        target = NetworkTarget(target.inputs, target.labels, layout, Prior(1.0))
    theta, asked = target.layout.trained(), [math.log(0.04), math.log(3.0), math.log(900.0)]
    expected = [by_jacobian(target, one) for one in covariances_of(target, structure, asked, bias_precision)]
    candidates = covariances_of(target, structure, NODES, bias_precision)
    assert not keeps_path(target.layout)
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=0, most_covariances=NUM_INPUTS):
        path = make_path(candidates, NODES, target.layout, theta)
        assert path is not None
        path.at(target.inputs, NODES[:1])
        calls, order = module.calls, torch.randperm(NUM_INPUTS, generator=seeded(2))
        for some in (slice(0, 5), order):
            for found, one in zip(path.at(target.inputs[some], asked), expected, strict=True):
                assert relative_errors(found, one[some]).max() < 0.01
                assert torch.linalg.eigvalsh(found).min() > 0
        assert module.calls == calls


def test_a_gaussian_on_the_path_predicts_without_a_pass_of_its_own() -> None:
    module, target = make_target()
    theta, place = target.layout.trained(), math.log(7.0)
    covariance, other = covariances_of(target, "kron", [place, place + 1])
    expected = by_jacobian(target, covariance)
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=0, most_covariances=NUM_INPUTS):
        path = make_path(covariances_of(target, "kron", NODES), NODES, target.layout, theta)
        assert path is not None
        path.at(target.inputs, NODES[:1])
        path.put(covariance, place)
        gaussians = [Gaussian(theta, one, target.layout, target.prior) for one in (covariance, other)]
        _, found = gaussians[0].logit_moments(target.inputs)
        calls = module.calls
        gaussians[0].logit_root(target.inputs)
        assert module.calls == calls
        assert relative_errors(found.double(), expected).max() < 0.01
        gaussians[1].logit_moments(target.inputs)
        assert module.calls > calls  # it was not put on the path


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_bins_of_curvature_agree_with_each_precision_alone(structure: str, rank: int | None) -> None:
    _, target = make_target(rank)
    theta, candidates = target.layout.trained(), covariances_of(target, structure, NODES)
    together = covariances_together(candidates, target.layout, theta)(target.inputs)
    alone = torch.cat([covariances_together([one], target.layout, theta)(target.inputs) for one in candidates])
    torch.testing.assert_close(alone[7], by_jacobian(target, candidates[7]), rtol=1e-3, atol=1e-5)
    errors = torch.stack([relative_errors(*pair) for pair in zip(together, alone, strict=True)])
    assert 1e-6 < errors.max() < 0.01
    for one, other in pairwise(together):  # a stronger prior has a smaller covariance in every direction
        assert torch.linalg.eigvalsh(one - other).min() > -1e-6 * one.diagonal(dim1=1, dim2=2).max()
