"""The Gaussian of a linearised network's logits: every structure against finite differences and the whole covariance."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.curvature import ggn
from bnncli.logits import _by_layer
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.network import NetworkTarget

K, N = 3, 7
STEP = 1e-5


class Mixed(nn.Module):
    """A layer and a norm used twice, a layer whose weight another reads, a bare parameter, a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped, self.scaled = (
            nn.Conv2d(1, 2, 2, padding=1),
            nn.Conv2d(2, 2, 2, groups=2),
            nn.BatchNorm2d(2),
        )
        self.again, self.read, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, K)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scaled(self.scaled(self.grouped(self.conv(x).tanh())).tanh()).mean(dim=(2, 3))
        hidden = self.again(self.again(hidden).tanh())
        hidden = self.read(hidden) + hidden @ self.read.weight
        return self.last(hidden * self.scale)


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, K)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(18, K)
    ),
    "mixed": Mixed,
}
SHAPE = (1, 2, 2)


def make_gaussian(structure: str, module: str = "mlp", pattern: str = "all", prior: Prior | None = None) -> Gaussian:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(MODULES[module]().eval())
    layout = ModuleLayout.of(network, pattern, num_outputs=K, input_shape=SHAPE)
    target = NetworkTarget(inputs(20, 1), torch.arange(20) % K, layout, prior or Prior(0.7))
    mean = layout.trained()
    hessian = ggn(target, mean, structure)
    covariance = registry.load_class("covariances", structure).from_hessian(hessian, target.prior, layout)
    return Gaussian(mean, covariance, layout, target.prior)


def inputs(count: int = N, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=seeded(seed), dtype=torch.float64)


def by_differences(gaussian: Gaussian, features: Tensor) -> Tensor:
    """J Sigma J^T (n, K, K), J by central differences, Sigma multiplied out."""
    steps = STEP * torch.eye(len(gaussian.mean), dtype=torch.float64)
    sides = [gaussian.layout.logits(features, gaussian.mean + sign * steps) for sign in (1, -1)]
    jacobian = (sides[0] - sides[1]).permute(1, 2, 0) / (2 * STEP)
    root = gaussian.covariance.unwhiten(torch.eye(len(gaussian.mean), dtype=torch.float64)).T
    return jacobian @ root @ root.T @ jacobian.mT


def check(gaussian: Gaussian) -> None:
    expected, features = by_differences(gaussian, inputs()), inputs()
    near = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)
    mean, covariance = gaussian.logit_moments(features)
    torch.testing.assert_close(mean, gaussian.layout.logits(features, gaussian.mean[None])[0])
    near(covariance, expected)
    near(gaussian.logit_marginals(features)[1], expected.diagonal(dim1=1, dim2=2))
    contrast = torch.eye(K, dtype=torch.float64) - 1 / K
    projected = (contrast @ expected @ contrast).diagonal(dim1=1, dim2=2)
    near(gaussian.logit_marginals(features, is_projected=True)[1], projected)
    columns = gaussian.logit_root(features)[1].apply(torch.eye(K, dtype=torch.float64)).permute(2, 1, 0)
    near(columns @ columns.mT, expected)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_moments_are_those_of_finite_differences(structure: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_by_layer._ELEMENTS, "cpu", 2000)  # several blocks of examples
    check(make_gaussian(structure, module))


@pytest.mark.parametrize(
    ("pattern", "prior"), [("*.weight", Prior(0.7)), ("*.bias+1", Prior(0.7)), ("all", Prior(0.7, 0.1))]
)
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block"])
def test_so_are_those_of_some_parameters_and_under_two_precisions(structure: str, pattern: str, prior: Prior) -> None:
    check(make_gaussian(structure, "conv", pattern, prior))


def test_single_precision_is_near() -> None:
    for structure in ("diag", "kron", "ekfac", "block"):
        gaussian = make_gaussian(structure, "conv")
        single = gaussian.logit_moments(inputs().float())[1]
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), gaussian.logit_moments(inputs())[1], rtol=1e-4, atol=1e-5)
