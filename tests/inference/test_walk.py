"""Chains of hmc: their warm-up, and how workers share them out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from problems.heads import by_noisy_sign, by_sign, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.inference.dynamics import FALL, PlainMover, State, WhitenedPotential, mean_of_chains, trajectory, transition
from bnncli.inference.hmc import (
    MOST_GROUPS,
    SamplerSettings,
    SamplerState,
    SharedMover,
    Workers,
    advance,
    chain_groups,
    sample_hmc,
)
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.workers import Team
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import choose_gradient

make_target = partial(head_target, num_examples=12, labels=by_sign, prior=0.3)
LARGE = HeadLayout(5, 60)


def small_potential() -> WhitenedPotential:
    target = make_target(HeadLayout(1, 2, has_bias=False))
    base = gaussian_at_mode(target)
    return WhitenedPotential(target, base.mean, base.covariance)


def large_potential() -> WhitenedPotential:
    target = head_target(LARGE, num_examples=200, prior=0.3)
    base = gaussian_at_mode(target)
    return WhitenedPotential(target, base.mean, base.covariance, pivot=torch.zeros_like(base.mean))


def points_of(potential: WhitenedPotential) -> tuple[Tensor, Tensor, State]:
    """Points of a grid, their probabilities under the posterior, and the potential there."""
    axis = torch.linspace(-10, 10, 161, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    state = potential.state(z)
    return z, (-state.potential).softmax(dim=0), state


def test_the_mean_of_settled_chains_is_the_posteriors_and_nearer_than_the_mean_of_their_places() -> None:
    z, weights, state = points_of(small_potential())
    mean = weights @ z
    assert mean.norm() > 0.2  # there is something to find
    found, plain = [], []
    for seed in range(100):
        index = torch.multinomial(weights, 200, replacement=True, generator=seeded(seed))
        found.append(mean_of_chains(z[index], state.gradient[index]) - mean)
        plain.append(z[index].mean(dim=0) - mean)
    errors = torch.stack(found)
    standard = errors.std(dim=0) / 10
    assert (
        errors.mean(dim=0).abs() < 4 * standard + 0.02 * mean.abs()
    ).all()  # shrunk by what is noise of it: 1 % or so
    assert errors.square().sum() < 0.5 * torch.stack(plain).square().sum()


def test_chains_that_tell_nothing_leave_the_mean_at_zero() -> None:
    z = torch.randn(16, 4000, generator=seeded(), dtype=torch.float64)
    assert not mean_of_chains(z[:1], z[:1]).any()
    assert not mean_of_chains(z, z).any()  # the Gaussian explains all
    scattered = mean_of_chains(z, torch.zeros_like(z))  # all there is to see is noise
    assert scattered.norm() < 0.3 * z.mean(dim=0).norm()


def test_a_mean_far_from_zero_is_kept() -> None:
    z = 3 + torch.randn(16, 50, generator=seeded(), dtype=torch.float64)
    torch.testing.assert_close(mean_of_chains(z, z - 3), torch.full((50,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_trajectories_about_a_pivot_are_reversible_and_preserve_volume(num_steps: int) -> None:
    plain = small_potential()
    potential = WhitenedPotential(plain.target, plain.mode, plain.covariance, pivot=torch.tensor([0.8, -0.3]).double())
    z = 2 * torch.randn(5, 2, generator=seeded(1), dtype=torch.float64)
    momentum = torch.ones_like(z)

    def move(z: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        start = potential.state(z)
        end, turned = trajectory(potential, start, momentum, step_size=0.4, num_steps=num_steps, dynamics="split")
        return end.z, turned

    end, turned = move(z, momentum)
    assert (end - z).norm() > 0.5
    back, returned = move(end, -turned)
    torch.testing.assert_close(back, z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returned, -momentum, rtol=1e-9, atol=1e-9)

    step = 1e-5
    shifts = step * torch.eye(4, dtype=torch.float64).view(4, 2, 2)
    phase = torch.stack([z[0], momentum[0]])
    columns = []
    for shift in shifts:
        ends = [torch.cat(move(at[:1], at[1:])).flatten() for at in (phase + shift, phase - shift)]
        columns.append((ends[0] - ends[1]) / (2 * step))
    assert float(torch.linalg.det(torch.stack(columns))) == pytest.approx(1, abs=1e-7)


def test_about_its_own_mean_a_gaussian_moves_exactly() -> None:
    """Shifted by its mean alone a Gaussian needs no kick: one step, whatever its length, keeps the energy."""
    potential = small_potential()
    plain = make_target(HeadLayout(1, 2, has_bias=False), likelihood_scale=0.0)
    base = gaussian_at_mode(plain)
    shift = torch.tensor([1.5, -2.0]).double()
    potential = WhitenedPotential(
        plain, base.mean - base.covariance.unwhiten(shift[None])[0], base.covariance, pivot=shift
    )
    z = torch.randn(6, 2, generator=seeded(2), dtype=torch.float64)
    state, momentum = potential.state(z), torch.randn(6, 2, generator=seeded(3), dtype=torch.float64)
    end, turned = trajectory(potential, state, momentum, step_size=1.7, num_steps=1, dynamics="split")
    before = state.potential + momentum.square().sum(dim=1) / 2
    torch.testing.assert_close(end.potential + turned.square().sum(dim=1) / 2, before)


def test_far_chains_fall_while_they_settle_and_near_ones_keep_to_the_exact_energy() -> None:
    potential = large_potential()
    dim = LARGE.num_params
    z = torch.randn(60, dim, generator=seeded(4), dtype=torch.float64)
    z[:30] *= 4
    state = potential.state(z)
    got = transition(potential, state, seeded(5), 1.5, "split", is_settling=True)
    exact = transition(potential, state, seeded(5), 1.5, "split")
    assert exact.is_falling is None
    assert got.is_falling[:30].all()
    assert not got.is_falling[30:].any()
    fallen = state.potential - got.state.potential
    assert (fallen[:30] > FALL * math.sqrt(dim)).all()
    assert torch.equal(got.state.z[30:], exact.state.z[30:])
    assert torch.equal(got.acceptance, exact.acceptance)
    assert (exact.acceptance[:30] < 0.05).any()  # which would have stayed


def test_chains_from_far_starts_are_settled_before_the_step_size_is_sought() -> None:
    """By the potential's distribution, P / 2 or so above its least, and in no more gradients than settled chains take."""
    potential, settings = large_potential(), SamplerSettings(num_warmup=40, target_accept=0.8, dynamics="split")
    dim = LARGE.num_params
    walk = SamplerState.start(potential, settings, 2 * torch.randn(16, dim, generator=seeded(6), dtype=torch.float64))
    generator = seeded(7)
    for _ in range(settings.num_settling):
        walk, _ = advance(potential, walk, settings, generator=generator)
    settled = walk.state.potential
    assert walk.num_gradients < 6 * settings.num_settling
    for _ in range(60):
        walk, _ = advance(potential, walk, settings, generator=generator)
    later = walk.state.potential
    error = (settled.var() / 16 + later.var() / 16).sqrt()
    assert (settled.mean() - later.mean()).abs() < 4 * error
    assert potential.pivot.any()


@pytest.mark.parametrize(("step_size", "has_pivot"), [(0.2, True), (0.05, False)])
def test_where_steps_are_short_the_gaussian_turns_about_the_mode(step_size: float, has_pivot: bool) -> None:
    potential, settings = large_potential(), SamplerSettings(num_warmup=20, target_accept=0.8, dynamics="split")
    z = torch.randn(16, LARGE.num_params, generator=seeded(8), dtype=torch.float64)
    walk = SamplerState.start(potential, settings, z)
    adaptation = walk.adaptation._replace(log_current=math.log(step_size))
    walk = walk._replace(num_done=settings.num_settling, adaptation=adaptation)
    advance(potential, walk, settings, generator=seeded(9))
    assert potential.pivot is not None
    assert bool(potential.pivot.any()) is has_pivot


STEP = {"step_size": 0.3, "num_steps": 4}
group_target = partial(head_target, num_examples=30, labels=by_noisy_sign, prior=0.5)


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
    potential = potential_of(group_target(HeadLayout(3, 4)), gradients)
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
    target = group_target(HeadLayout(1, 1))
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
