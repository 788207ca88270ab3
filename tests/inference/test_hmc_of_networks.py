"""Chains over a network's weights: against quadrature of two weights, and judged by predictions where weights are not identified."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.evaluation.convergence import held_out_convergence, label_convergence
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.nuts import sample_nuts
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import HeldOutInputs, NetworkTarget

POINTS = torch.tensor([[-1.5], [-0.4], [0.3], [2.0]], dtype=torch.float64)


@cache
def two_weights(num_examples: int) -> NetworkTarget:
    """Of b tanh(a x): (a, b) and (-a, -b) are the same network."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).eval()
    inputs = torch.randn(num_examples, 1, generator=seeded(1), dtype=torch.float64)
    noise = 0.5 * torch.randn(num_examples, 1, generator=seeded(2), dtype=torch.float64)
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=1, input_shape=(1,))
    return NetworkTarget(inputs, (inputs + noise > 0)[:, 0].long(), layout, Prior(0.5))


def quantities(theta: Tensor) -> Tensor:
    """What neither sign nor scale of a unit hides, (..., 7): a^2, b^2, a b, and probabilities at a few inputs."""
    a, b = theta.double().unbind(dim=-1)
    logits = b.unsqueeze(-1) * torch.tanh(a.unsqueeze(-1) * POINTS[:, 0])
    return torch.cat([torch.stack([a * a, b * b, a * b], dim=-1), logits.sigmoid()], dim=-1)


@pytest.mark.parametrize("sampler", ["hmc", pytest.param("nuts", marks=pytest.mark.nightly)])
def test_two_weights_have_the_moments_of_quadrature(sampler: str) -> None:
    target = two_weights(8)
    line = torch.linspace(-9, 9, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    expected = target.log_joint(grid).softmax(dim=0) @ quantities(grid)
    common = {"mode": torch.ones(2, dtype=torch.float64), "covariance": Diag(torch.ones(2, dtype=torch.float64))}
    if sampler == "hmc":
        drawn = sample_hmc(target, **common, generator=seeded(3), num_chains=200, num_warmup=20, num_draws=20)
        groups = drawn.draws
    else:
        drawn = sample_nuts(target, **common, seed=1, num_chains=2, num_warmup=30, num_draws=120)
        groups = drawn.draws.reshape(2 * 6, 20, 2)
    means = quantities(groups).mean(dim=1)
    error = means.std(dim=0) / len(means) ** 0.5
    assert ((means.mean(dim=0) - expected).abs() < 4 * error).all()
    assert (error < 0.3 * expected.abs()).all()


def test_a_network_of_one_layer_has_the_posterior_of_the_last_layer() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2)).eval()
    inputs, labels = torch.randn(40, 3, generator=seeded(1), dtype=torch.float64), torch.arange(40) % 2
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=2, input_shape=(3,))
    targets = (
        NetworkTarget(inputs, labels, layout, Prior(1.0)),
        LastLayerTarget(inputs, labels, HeadLayout(2, 3), Prior(1.0)),
    )
    found = []
    for seed, target in enumerate(targets):
        drawn = sample_hmc(
            target, mode=torch.zeros(8, dtype=torch.float64), covariance=Diag(torch.full((8,), 0.2, dtype=torch.float64)),
            generator=seeded(seed), num_chains=60, num_warmup=15, num_draws=15,
        )  # fmt: skip
        means = torch.cat([drawn.draws, drawn.draws.square()], dim=2).double().mean(dim=1)
        found.append((means.mean(dim=0), means.std(dim=0) / len(means) ** 0.5))
    (one, error), (other, also) = found
    assert ((one - other).abs() < 4 * (error**2 + also**2).sqrt()).all()
    assert (error < 0.1).all()


def test_a_linear_network_is_judged_as_the_last_layer_is() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2)).eval()
    inputs, labels = torch.randn(30, 3, generator=seeded(1)), torch.arange(30) % 2
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=2, input_shape=(3,))
    held_out = HeldOutInputs(NetworkTarget(inputs, labels, layout, Prior(1.0)))
    draws = torch.randn(3, 40, 8, generator=seeded(2)).cumsum(dim=1)
    one, other = (
        label_convergence(draws, held_out),
        held_out_convergence(draws, inputs, labels, layout=HeadLayout(2, 3)),
    )
    assert one.ess_bulk is not None
    assert one.ess_bulk == pytest.approx(other.ess_bulk, rel=1e-4)
    assert (one.r_hat, one.ess_tail) == pytest.approx((other.r_hat, other.ess_tail), rel=1e-4)
