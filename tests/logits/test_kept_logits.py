"""What is kept of linearised logits gives what making it again gives, whatever is asked of it, and takes no pass of the network."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.curvature import ggn
from bnncli.inference.mode import covariance_at
from bnncli.inference.network_memory import kept_bytes
from bnncli.logits._kept import keeping
from bnncli.logits._network import covariances_together
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.network import NetworkTarget

K, N, D = 3, 12, 5
PRECISIONS = 0.3, 2.0, 40.0


class Counting(nn.Module):
    """A layer used at several places, one used once, a norm and a bare parameter; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.norm, self.last = nn.Linear(1, 2), nn.LayerNorm(2), nn.Linear(2, K)
        self.scale = nn.Parameter(torch.ones(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.norm(self.each(x.unsqueeze(2)).tanh()).mean(dim=1) * self.scale)


def make_target() -> tuple[Counting, NetworkTarget]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Counting().eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=K, input_shape=(D,))
    inputs = torch.randn(N, D, generator=seeded(1))
    return module, NetworkTarget(inputs, torch.arange(N) % K, layout, Prior(1.0))


def gaussians(target: NetworkTarget, structure: str, theta: Tensor) -> list[Gaussian]:
    """Of one curvature under several priors."""
    hessian, found = ggn(target, theta, structure), []
    for precision in PRECISIONS:
        own = target.with_prior(Prior(precision))
        covariance = covariance_at(own, theta, structure, hessian=hessian).covariance
        found.append(Gaussian(theta, covariance, target.layout, own.prior))
    return found


@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_moments_are_the_same_in_any_blocks_and_take_one_pass_of_each_input(structure: str) -> None:
    module, target = make_target()
    every = gaussians(target, structure, target.layout.trained())
    expected = [one.logit_moments(target.inputs) for one in every]
    with keeping(target.layout.network, N):
        every[0].logit_moments(target.inputs)
        calls = module.calls
        order = torch.randperm(N, generator=seeded(2))
        for one, (mean, covariance) in zip(every, expected, strict=True):
            for rows in (slice(0, 5), slice(5, N), order, order[:3]):
                found = one.logit_moments(target.inputs[rows])
                torch.testing.assert_close(found, (mean[rows], covariance[rows]), rtol=1e-4, atol=1e-6)
                marginals = one.logit_marginals(target.inputs[rows], is_projected=False)
                torch.testing.assert_close(marginals[1], found[1].diagonal(dim1=1, dim2=2), rtol=1e-4, atol=1e-6)
        assert module.calls == calls


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_covariances_of_many_priors_share_it(structure: str) -> None:
    module, target = make_target()
    theta = target.layout.trained()
    covariances = [one.covariance for one in gaussians(target, structure, theta)]
    expected = covariances_together(covariances, target.layout, theta)(target.inputs)
    with keeping(target.layout.network, N):
        first = covariances_together(covariances[:1], target.layout, theta)(target.inputs)
        torch.testing.assert_close(first, expected[:1])
        calls = module.calls
        for rows in (slice(0, 3), slice(1, 3)):
            found = covariances_together(covariances[rows], target.layout, theta)(target.inputs)
            torch.testing.assert_close(found, expected[rows])
    assert module.calls == calls


def test_another_theta_or_another_curvature_has_its_own() -> None:
    _, target = make_target()
    first = target.layout.trained()
    second = first + 0.3
    other = NetworkTarget(target.inputs.flip(0).square(), target.labels, target.layout, Prior(1.0))
    made = [gaussians(target, "kron", first)[0], gaussians(target, "kron", second)[0]]
    made.append(gaussians(other, "kron", second)[0])  # other bases at the same theta
    expected = [one.logit_moments(target.inputs) for one in made]
    with keeping(target.layout.network, N):
        for one, moments in zip(made, expected, strict=True):
            torch.testing.assert_close(one.logit_moments(target.inputs), moments, rtol=1e-4, atol=1e-6)
    assert not target.layout.network.kept


@pytest.mark.parametrize("room", [0, N - 1])
def test_without_room_nothing_is_kept_of_what_exceeds_it(room: int) -> None:
    module, target = make_target()
    gaussian = gaussians(target, "kron", target.layout.trained())[0]
    expected = gaussian.logit_moments(target.inputs)
    with keeping(target.layout.network, room) if room else nullcontext():
        gaussian = replace(gaussian)  # without what the first has kept of its own
        torch.testing.assert_close(gaussian.logit_moments(target.inputs), expected)
        calls = module.calls
        torch.testing.assert_close(gaussian.logit_moments(target.inputs), expected)
        assert module.calls > calls


@pytest.mark.parametrize("structure", ["kron", "diag", "block", "full"])
def test_room_is_planned_as_it_is_taken(structure: str) -> None:
    _, target = make_target()
    gaussian = gaussians(target, structure, target.layout.trained())[0]
    with keeping(target.layout.network, N):
        gaussian.logit_moments(target.inputs)
        made = [one for kept in target.layout.network.kept.values() for one in kept.made.values()]
        taken = sum(part.nbytes for one in made for part in one if isinstance(part, Tensor))
    assert taken == N * kept_bytes(target.layout, structure)
