"""How often a network is passed through for its predictions: examples go together however many numbers it has, and none goes twice."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.covariances.diag import Diag
from bnncli.integrators import load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.posteriors.gaussian import Gaussian

K, N, D = 3, 70, 4


class Wide(nn.Module):
    """So many numbers an example that a block of logits has room for none; counts the examples that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, K)
        self.blocks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.blocks.append(len(x))
        return self.last(x.repeat(1, 2**17).tanh()[:, :D])


def make() -> tuple[Wide, Gaussian, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Wide().eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=K, input_shape=(D,))
    assert layout.widest >= 2**19
    spread = torch.full((layout.num_params,), 4.0, dtype=torch.float64)
    module.blocks.clear()
    return module, Gaussian(layout.trained(), Diag(spread), layout), torch.randn(N, D, generator=seeded(1))


@pytest.mark.parametrize("task", ["plug-in", "scores"])
def test_one_pass_is_of_many_examples(task: str) -> None:
    module, gaussian, features = make()
    if task == "plug-in":
        load_integrator("plug-in").predict(gaussian, features, num_samples=None, generator=seeded(0))
    else:
        energy_and_max_logit(features, gaussian.mean, gaussian.layout)
    assert module.blocks == [64, 6]


def test_draws_of_logits_take_no_pass_each_and_no_example_again() -> None:
    module, gaussian, features = make()
    mean, covariance = gaussian.logit_moments(features)
    module.blocks.clear()
    found = load_integrator("logit-mc").predict(gaussian, features, num_samples=256, generator=seeded(0))
    assert sum(module.blocks) == 2 * N  # for the mean, and for the derivatives
    assert (found.probs.argmax(dim=1) != mean.argmax(dim=1)).any()  # of which a guess of the class fails
    noise = torch.randn(5_000, N, K, generator=seeded(2))
    expected = (mean + noise * covariance.diagonal(dim1=1, dim2=2).sqrt()).softmax(dim=2).mean(dim=0)
    torch.testing.assert_close(found.probs, expected, atol=0.13, rtol=0)  # four standard errors
