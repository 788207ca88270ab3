"""Posteriors of several members: mixtures, ensembles and stacks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.integrators import load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.integrators.mc import Mc
from bnncli.models.features import pass_to_head
from bnncli.models.head import head_of
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork
from bnncli.posteriors.ensemble import Ensemble
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.mixture import MemberLayout, Mixture
from bnncli.posteriors.stack import Stack
from bnncli.structures.full import Full

HEAD = HeadLayout(3, 5)


def network(seed: int) -> nn.Sequential:
    """A hidden layer behind batch norm with statistics of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        found(torch.randn(16, 4) * (1 + seed) + seed)
    return found.eval()


def mixture(num_members: int, *, scale: float = 0.3) -> tuple[Mixture, list[nn.Sequential]]:
    networks = [network(seed) for seed in range(num_members)]
    head = head_of(networks[0], "3")
    bound = ModuleNetwork(networks[0], features_of=partial(pass_to_head, head))
    whole = ModuleLayout.of(bound, STATE, num_outputs=3, input_shape=(4,))
    states = [ModuleLayout.of(ModuleNetwork(one), STATE, num_outputs=3, input_shape=(4,)).trained() for one in networks]
    heads = torch.stack([HEAD.join(one[3].weight.detach(), one[3].bias.detach()) for one in networks])
    gaussians = []
    for number, theta in enumerate(heads.double()):
        root = torch.randn(18, 18, generator=torch.Generator().manual_seed(number), dtype=torch.float64).tril()
        root.diagonal().abs_().add_(0.1)
        gaussians.append(Gaussian(theta + 0.1, Full(scale * root), HEAD))
    layout = MemberLayout(HEAD, whole, torch.stack(states).float(), heads)
    return Mixture(gaussians, layout), networks


def inputs() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(5))


def test_members_have_equal_shares_of_any_stretch_of_the_draws() -> None:
    posterior, _ = mixture(3)
    numbers = posterior.sample(100, torch.Generator().manual_seed(0))[:, 0]
    for start in range(0, 90, 10):
        counts = torch.bincount(numbers[start : start + 10].long(), minlength=3)
        assert counts.min() >= 3
    default = posterior.sample(None, torch.Generator().manual_seed(0))
    assert torch.bincount(default[:, 0].long()).tolist() == [334, 334, 334]


def test_logits_of_a_draw_are_those_of_its_members_network_with_that_last_layer() -> None:
    posterior, networks = mixture(3)
    theta = posterior.sample(11, torch.Generator().manual_seed(1))
    found = posterior.layout.logits(inputs(), theta)
    center, logits = posterior.layout.logit_draws(theta)(inputs())
    for place, draw in enumerate(theta):
        weight, bias = HEAD.split(draw[1:])
        with torch.no_grad():
            expected = networks[int(draw[0])][:3](inputs()) @ weight.T + bias
        torch.testing.assert_close(found[place], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(slice(4, 9)).transpose(1, 2), found[4:9], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(center.T, found.mean(0), rtol=1e-4, atol=1e-5)


def test_a_prediction_is_the_mean_of_each_gaussians_own() -> None:
    posterior, networks = mixture(2)
    ready = Mc().prepare(posterior, num_samples=40000, generator=torch.Generator().manual_seed(2))
    found = ready.predict(posterior, inputs()).probs
    each = []
    for gaussian, one in zip(posterior.gaussians, networks, strict=True):
        with torch.no_grad():
            features = one[:3](inputs()).double()
        noise = torch.randn(40000, 18, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        draws = gaussian.mean + noise @ gaussian.covariance.scale_tril.T
        each.append(HEAD.logits(features, draws).softmax(2).mean(0))
    torch.testing.assert_close(found.double(), (each[0] + each[1]) / 2, rtol=0, atol=0.01)
    assert (each[0] - each[1]).abs().max() > 0.05
    assert len(ready.groups) > 1


def test_its_mean_logits_are_the_mean_of_the_members() -> None:
    posterior, networks = mixture(2)
    energy, _ = energy_and_max_logit(inputs(), posterior.centers, posterior.layout)
    means = []
    for gaussian, one in zip(posterior.gaussians, networks, strict=True):
        with torch.no_grad():
            means.append(HEAD.logits(one[:3](inputs()).double(), gaussian.mean.unsqueeze(0))[0])
    expected = -torch.logsumexp((means[0] + means[1]) / 2, dim=1)
    torch.testing.assert_close(energy.double(), expected, rtol=1e-4, atol=1e-5)


def test_it_comes_back_from_its_file() -> None:
    posterior, _ = mixture(2)
    tensors, meta = posterior.to_tensors()
    assert posterior.layout.whole.network is not None
    again = Mixture.from_tensors(tensors, meta).bound_to(posterior.layout.whole.network)
    draws = [one.sample(9, torch.Generator().manual_seed(4)) for one in (posterior, again)]
    assert torch.equal(*draws)
    assert torch.equal(*(one.layout.logits(inputs(), draws[0]) for one in (posterior, again)))


def member_network(seed: int) -> nn.Sequential:
    """Batch norm whose statistics are its own, and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        found(torch.randn(16, 4) * (1 + seed) + seed)
    return found.eval()


def ensemble(num_members: int) -> tuple[Ensemble, list[nn.Sequential]]:
    networks = [member_network(seed) for seed in range(num_members)]
    layouts = [ModuleLayout.of(ModuleNetwork(one), STATE, num_outputs=3, input_shape=(4,)) for one in networks]
    members = torch.stack([layout.trained().float() for layout in layouts])
    return Ensemble(members, layouts[0]), networks


def test_the_state_has_buffers_of_real_numbers_and_no_counters() -> None:
    names = [part.name for part in ensemble(1)[0].layout.parts]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "0.running_mean", "0.running_var"]


def test_members_are_used_once_each_and_never_again() -> None:
    posterior, _ = ensemble(4)
    generator = torch.Generator().manual_seed(0)
    for count in (None, 4, 9):
        assert torch.equal(posterior.sample(count, generator), posterior.members)
    chosen = [posterior.sample(2, generator) for _ in range(40)]
    places = {tuple(int((posterior.members == row).all(1).nonzero()) for row in pair) for pair in chosen}
    assert places == {(a, b) for a in range(4) for b in range(a + 1, 4)}


def test_a_prediction_is_the_mean_of_the_members_and_has_no_error() -> None:
    posterior, networks = ensemble(3)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    ready = Mc().prepare(posterior, num_samples=None, generator=generator)
    with torch.no_grad():
        expected = torch.stack([one(inputs).softmax(1) for one in networks]).mean(0)
        found = ready.predict(posterior, inputs).probs
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)
    assert (ready.num_draws, len(ready.groups)) == (3, 1)
    some = Mc().prepare(posterior, num_samples=2, generator=generator)
    assert (some.num_draws, len(some.groups)) == (2, 2)


def test_an_ensemble_comes_back_from_its_file() -> None:
    posterior, networks = ensemble(2)
    tensors, meta = posterior.to_tensors()
    again = Ensemble.from_tensors(tensors, meta).bound_to(ModuleNetwork(networks[0]))
    assert torch.equal(again.members, posterior.members)
    assert again.layout == posterior.layout


LAYOUT = HeadLayout(3, 4)
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def make_stack() -> Stack:
    return Stack(torch.randn(3, LAYOUT.num_params, generator=seeded()), WEIGHTS, LAYOUT)


@pytest.mark.parametrize("samples", [None, 3, 1000])
def test_mc_is_the_weighted_mean_of_the_members(samples: int | None) -> None:
    stack, features = make_stack(), torch.randn(9, 4, generator=seeded(1))
    got = load_integrator("mc").predict(stack, features, num_samples=samples, generator=seeded(2))
    members = [load_integrator("mc").predict(
        Stack(one[None], torch.ones(1, dtype=torch.float64), LAYOUT), features, num_samples=None, generator=seeded()
    ) for one in stack.members]  # fmt: skip
    expected = sum(weight * one.probs.double() for weight, one in zip(WEIGHTS, members, strict=True))
    torch.testing.assert_close(got.probs.double(), expected, rtol=0, atol=1e-6)
    spread = got.entropy.double() - sum(
        weight * one.entropy.double() for weight, one in zip(WEIGHTS, members, strict=True)
    )
    torch.testing.assert_close(got.mutual_info.double(), spread, rtol=0, atol=1e-5)


def test_draws_are_as_often_a_member_as_its_weight_says() -> None:
    stack = make_stack()
    draws = stack.sample(20_000, seeded())
    shares = torch.stack([(draws == one).all(dim=1).double().mean() for one in stack.members])
    assert float(shares.sum()) == pytest.approx(1)
    errors = (WEIGHTS * (1 - WEIGHTS) / 20_000).sqrt()
    assert bool(((shares - WEIGHTS).abs() < 4 * errors).all())
    torch.testing.assert_close(stack.center, WEIGHTS @ stack.members.double())


def test_a_file_gives_the_same_mixture_or_is_refused() -> None:
    tensors, meta = make_stack().to_tensors()
    again = Stack.from_tensors(tensors, meta)
    assert torch.equal(again.members, make_stack().members)
    assert torch.equal(again.weights, WEIGHTS)
    for bad in ([0.5, 0.5, 0.5], [1.2, -0.1, -0.1], [1.0, 0.0, 0.0]):
        with pytest.raises(ValueError, match="sum to one"):
            Stack.from_tensors({**tensors, "weights": torch.tensor(bad, dtype=torch.float64)}, meta)
