"""A mixture of Gaussians over the last layers of several networks: equal shares, each member's own features, its file."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bnncli.covariances.full import Full
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.integrators.mc import Mc
from bnncli.models.features import pass_to_head
from bnncli.models.head import head_of
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.mixture import MemberLayout, Mixture

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
