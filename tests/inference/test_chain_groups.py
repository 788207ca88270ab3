"""Chains that workers share out: every chain has one, the ends are those that each group has alone, whoever moves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from problems.heads import by_noisy_sign, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.inference.dynamics import PlainMover, State, WhitenedPotential
from bnncli.inference.hmc import MOST_GROUPS, SharedMover, Workers, chain_groups, sample_hmc
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.workers import Team
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import choose_gradient

STEP = {"step_size": 0.3, "num_steps": 4}
make_target = partial(head_target, num_examples=30, labels=by_noisy_sign, prior=0.5)


@dataclass(frozen=True)
class Told(Team):
    """A worker that hears what the others once said: `heard`, or nothing of them yet."""

    said: list[Tensor] = field(default_factory=list)
    heard: list[Tensor] = field(default_factory=list)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.said.append(tensor.clone())
        return self.heard or [tensor] * self.size


def potential_of(target: LastLayerTarget, gradients: str = "float32") -> WhitenedPotential:
    base = gaussian_at_mode(target)
    coarse = choose_gradient(gradients, target, base.mean)
    return WhitenedPotential(target, base.mean, base.covariance, coarse)


def moved_by(potential: WhitenedPotential, size: int, start: State, momentum: Tensor) -> list[tuple[State, Tensor]]:
    """The ends of all chains, as each of so many workers has them."""
    groups = chain_groups(len(momentum), smallest=2)

    def mover(team: Team) -> SharedMover:
        return SharedMover(potential, groups, team, lambda: PlainMover(potential, "split"))

    first = [Told(rank, size) for rank in range(size)]
    for team in first:
        mover(team)(start, momentum, **STEP)
    heard = [team.said[0] for team in first]
    return [mover(Told(rank, size, heard=heard))(start, momentum, **STEP) for rank in range(size)]


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ends_are_those_of_each_group_alone_for_any_number_of_workers(size: int, gradients: str) -> None:
    potential = potential_of(make_target(HeadLayout(3, 4)), gradients)
    generator = seeded()
    z, momentum = (torch.randn(11, 15, generator=generator, dtype=torch.float64) for _ in range(2))
    start = potential.state(z)
    expected = []
    for group in chain_groups(11, smallest=2):
        end, turned = PlainMover(potential, "split")(State(*(part[group] for part in start)), momentum[group], **STEP)
        expected.append((*potential.with_energy(end), turned))
    whole = [torch.cat(parts) for parts in zip(*expected, strict=True)]
    for state, turned in moved_by(potential, size, start, momentum):
        for found, wanted in zip((*state, turned), whole, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("num_chains", "smallest", "sizes"),
    [(16, 4, [4] * 4), (3, 4, [3]), (1, 1, [1]), (10, 4, [5, 5]), (11, 4, [5, 6]), (4, 1, [1] * 4)],
)
def test_chains_go_in_groups_of_a_size_that_no_number_of_workers_changes(
    num_chains: int, smallest: int, sizes: list[int]
) -> None:
    groups = chain_groups(num_chains, smallest=smallest)
    assert [group.stop - group.start for group in groups] == sizes
    assert [place for group in groups for place in range(group.start, group.stop)] == list(range(num_chains))
    assert len(chain_groups(10_000, smallest=1)) == MOST_GROUPS


def test_shared_chains_draw_from_the_same_posterior_as_one_batch() -> None:
    target = make_target(HeadLayout(1, 1))
    base = gaussian_at_mode(target)

    def run(workers: Workers | None) -> Tensor:
        options = {"num_chains": 8, "num_warmup": 20, "num_draws": 300}
        drawn = sample_hmc(
            target, mode=base.mean, covariance=base.covariance, generator=seeded(), workers=workers, **options
        )
        return drawn.draws.double()

    one, shared = run(None), run(Workers(Team(0, 1), 2))
    # The same random numbers: only rounding differs, and chains of a nearly Gaussian target do not drive it apart.
    assert torch.allclose(one, shared, atol=1e-3)
