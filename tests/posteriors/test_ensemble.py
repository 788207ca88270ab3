"""A deep ensemble as a posterior: each member once, buffers with parameters, and no Monte Carlo error of all of them."""

from __future__ import annotations

import torch
from torch import nn

from bnncli.integrators.mc import Mc
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork
from bnncli.posteriors.ensemble import Ensemble


def network(seed: int) -> nn.Sequential:
    """Batch norm whose statistics are its own, and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        found(torch.randn(16, 4) * (1 + seed) + seed)
    return found.eval()


def ensemble(num_members: int) -> tuple[Ensemble, list[nn.Sequential]]:
    networks = [network(seed) for seed in range(num_members)]
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


def test_it_comes_back_from_its_file() -> None:
    posterior, networks = ensemble(2)
    tensors, meta = posterior.to_tensors()
    again = Ensemble.from_tensors(tensors, meta).bound_to(ModuleNetwork(networks[0]))
    assert torch.equal(again.members, posterior.members)
    assert again.layout == posterior.layout
