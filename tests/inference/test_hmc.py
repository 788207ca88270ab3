"""HMC: the laws of its dynamics, Gaussians, and a two-parameter posterior on a grid; NUTS beside it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from interrupted import StopAt
from problems.heads import by_sign, gaussian_at_mode, head_target
from problems.long_run import long_but
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import Interrupted, NumericError
from bnncli.evaluation.convergence import convergence, held_out_convergence, label_convergence
from bnncli.inference.dynamics import (
    DYNAMICS,
    JITTER,
    TURN,
    MemoryDraws,
    StepFactors,
    StepSizeAdaptation,
    WhitenedPotential,
    adaptation_statistic,
    integrate,
    num_trajectory_gradients,
    trajectory,
    trajectory_stages,
    transition,
)
from bnncli.inference.hmc import HmcRun, choose_residual, sample_hmc
from bnncli.inference.nuts import sample_nuts
from bnncli.numerics import random
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.structures.full import Full
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import HeldOutInputs, NetworkTarget
from bnncli.targets.variants import GRADIENTS, CoarseGradient, choose_gradient

every_dynamics = pytest.mark.parametrize("dynamics", DYNAMICS)
LAYOUTS = [HeadLayout(1, 1), HeadLayout(1, 2, has_bias=False), HeadLayout(2, 1, has_bias=False)]
make_target = partial(head_target, num_examples=12, labels=by_sign, prior=0.3)


def run(
    target: LastLayerTarget, base: Gaussian, dynamics: str = "split", gradients: str = "float32", **options: Any
) -> HmcRun:
    options = {"coarse": choose_gradient(gradients, target, base.mean), **options}
    return sample_hmc(
        target, mode=base.mean, covariance=base.covariance, generator=seeded(), dynamics=dynamics, **options
    )


def grid_moments(target: LastLayerTarget, base: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean (2,) and covariance (2, 2) of the posterior, in base's whitened coordinates, by brute force."""
    axis = torch.linspace(-12, 12, 301, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    weights = target.log_joint(base.mean + base.covariance.unwhiten(z)).softmax(dim=0)
    mean = weights @ z
    return mean, ((z - mean).T * weights) @ (z - mean)


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Means and second moments of draws (C, T, 2) lie within 4 standard errors, from the spread between chains."""
    first = draws.mean(dim=1)
    error = first.std(dim=0) / math.sqrt(draws.shape[0])
    assert ((first.mean(dim=0) - mean).abs() < 4 * error).all()
    centred = draws - mean
    second = (centred.unsqueeze(-1) * centred.unsqueeze(-2)).mean(dim=1)
    error = second.std(dim=0) / math.sqrt(draws.shape[0])
    assert ((second.mean(dim=0) - covariance).abs() < 4 * error).all()


@every_dynamics
@pytest.mark.parametrize("structure", long_but(registry.names("curvature"), "full", "kron"))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_draws_have_the_moments_of_the_posterior_on_a_grid(dynamics: str, structure: str, layout: HeadLayout) -> None:
    target = make_target(layout)
    base = gaussian_at_mode(target, structure)
    result = run(target, base, dynamics, num_chains=320, num_warmup=30, num_draws=40)
    z = base.covariance.whiten(result.draws.double().flatten(0, 1) - base.mean).view(320, 40, 2)
    assert_moments(z, *grid_moments(target, base))


@pytest.mark.parametrize(
    ("dynamics", "gradients"), [("leapfrog", "tf32"), ("split", "bfloat16"), ("split", "wrong"), ("leapfrog", "wrong")]
)
def test_draws_have_the_moments_of_the_posterior_whatever_kicks(dynamics: str, gradients: str) -> None:
    target = make_target(LAYOUTS[1])
    base = gaussian_at_mode(target)
    options = {"coarse": off_by_a_third(target, base.mean)} if gradients == "wrong" else {"gradients": gradients}
    result = run(target, base, dynamics, num_chains=320, num_warmup=20, num_draws=25, **options)
    z = base.covariance.whiten(result.draws.double().flatten(0, 1) - base.mean).view(320, 25, 2)
    assert_moments(z, *grid_moments(target, base))
    expected = torch.stack([target.log_joint(chain.double()) for chain in result.draws[:5]])
    torch.testing.assert_close(result.log_joint[:5], expected, rtol=1e-5, atol=1e-5)


def test_draws_have_the_moments_of_the_posterior_whatever_residual_moves_them() -> None:
    target = make_target(LAYOUTS[1])
    base = gaussian_at_mode(target)
    wrong = {"residual": lambda displacement: 0.3 * torch.sin(displacement) + 0.2}
    result = run(target, base, num_chains=320, num_warmup=20, num_draws=25, **wrong)
    z = base.covariance.whiten(result.draws.double().flatten(0, 1) - base.mean).view(320, 25, 2)
    assert_moments(z, *grid_moments(target, base))


def separable_by(noise: float) -> LastLayerTarget:
    layout = HeadLayout(4, 20)
    features = torch.randn(125_000, 20, generator=seeded())
    labels = (features[:, :4] + noise * torch.randn(125_000, 4, generator=seeded(1))).argmax(dim=1)
    return LastLayerTarget(features, labels, layout, Prior(1.0))


@pytest.mark.long
def test_some_examples_move_chains_as_well_as_all_of_them_do() -> None:
    target = separable_by(1.0)
    base = gaussian_at_mode(target)
    residual = choose_residual(target, base.mean, base.covariance, seeded())
    assert residual is not None
    assert residual.share < 0.05
    with_all, with_some = (
        run(target, base, num_chains=16, num_warmup=20, num_draws=40, target_accept=0.9, residual=one)
        for one in (None, residual)
    )
    assert float(with_some.acceptance_rate.mean()) > 0.9
    assert (with_some.n_steps == 2).all()  # one is cheap beside the energy
    of_all, of_some = (convergence(one.draws.numpy()) for one in (with_all, with_some))
    assert of_some.ess_bulk > 0.9 * of_all.ess_bulk


def test_chains_move_by_all_examples_of_a_small_or_far_from_gaussian_target() -> None:
    small = make_target(LAYOUTS[0])
    base = gaussian_at_mode(small)
    assert choose_residual(small, base.mean, base.covariance, seeded()) is None
    far = replace(separable_by(1.0), likelihood_scale=4e-4, prior=Prior(1e-3))
    base = gaussian_at_mode(far)
    assert choose_residual(far, base.mean, base.covariance, seeded()) is None


def off_by_a_third(target: LastLayerTarget, anchor: Tensor) -> Any:
    """A gradient of another posterior: its chains, if they asked it for energies too, would be there."""
    return lambda displacement: 0.7 * target.log_joint_and_grad(anchor + displacement)[1] + 0.2


@every_dynamics
def test_a_gaussian_posterior_gets_its_moments(dynamics: str) -> None:
    target = make_target(LAYOUTS[0], likelihood_scale=0.0)
    result = run(target, gaussian_at_mode(target), dynamics, num_chains=320, num_warmup=30, num_draws=40)
    assert_moments(result.draws.double(), torch.zeros(2), torch.eye(2) / 0.3)


def test_split_dynamics_accept_everything_on_their_own_gaussian() -> None:
    target = make_target(LAYOUTS[0], likelihood_scale=0.0)
    result = run(target, gaussian_at_mode(target), num_chains=8, num_warmup=20, num_draws=20)
    assert result.acceptance_rate.min() > 1 - 1e-9
    assert result.n_steps.max() == 1


def start_of_a_trajectory() -> tuple[WhitenedPotential, Tensor, Tensor]:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    z = 2 * torch.randn(5, 2, generator=seeded(1), dtype=torch.float64)
    return WhitenedPotential(target, base.mean, base.covariance), z, torch.ones_like(z)


def total_energy(potential: Tensor, momentum: Tensor) -> Tensor:
    return potential + 0.5 * momentum.square().sum(dim=1)


@every_dynamics
def test_trajectories_are_reversible(dynamics: str) -> None:
    potential, z, momentum = start_of_a_trajectory()
    options = {"step_size": 0.3, "num_steps": 7, "dynamics": dynamics}
    end, end_momentum = trajectory(potential, potential.state(z), momentum, **options)
    back, back_momentum = trajectory(potential, end, -end_momentum, **options)
    torch.testing.assert_close(back.z, z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(back_momentum, -momentum, rtol=1e-9, atol=1e-9)
    assert (end.z - z).norm() > 1


@every_dynamics
def test_trajectories_preserve_volume(dynamics: str) -> None:
    potential, z, momentum = start_of_a_trajectory()
    options = {"step_size": 0.4, "num_steps": 3, "dynamics": dynamics}

    def move(phase: Tensor) -> Tensor:
        end, end_momentum = trajectory(potential, potential.state(phase[:1]), phase[1:], **options)
        return torch.cat([end.z, end_momentum]).flatten()

    phase, step = torch.stack([z[0], momentum[0]]), 1e-5
    shifts = step * torch.eye(4, dtype=torch.float64).view(4, 2, 2)
    jacobian = torch.stack([(move(phase + shift) - move(phase - shift)) / (2 * step) for shift in shifts])
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1, abs=1e-7)


@every_dynamics
def test_energy_errors_fall_with_the_square_of_the_step(dynamics: str) -> None:
    potential, z, momentum = start_of_a_trajectory()
    state = potential.state(z)
    errors = []
    for num_steps in (20, 40):
        options = {"step_size": 1.5 / num_steps, "num_steps": num_steps, "dynamics": dynamics}
        end, end_momentum = trajectory(potential, state, momentum, **options)
        change = total_energy(end.potential, end_momentum) - total_energy(state.potential, momentum)
        errors.append(float(change.norm()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 6, 7, 12])
def test_parts_of_a_trajectory_make_its_whole_length_and_are_the_same_backwards(num_steps: int) -> None:
    found = trajectory_stages(num_steps, 0.1, dynamics="split")
    assert len(found) == num_steps
    assert sum(one.whole for one in found) == pytest.approx(0.1 * num_steps)
    assert sum(one.before + one.after for one in found) == pytest.approx(0.1 * num_steps)
    kicks, moves = [(one.before, one.after) for one in found], [one.whole for one in found]
    assert kicks == [pytest.approx((after, before)) for before, after in reversed(kicks)]
    assert moves == pytest.approx(moves[::-1])
    assert [(one.before, one.whole, one.after) for one in trajectory_stages(num_steps, 0.1, dynamics="leapfrog")] == [
        pytest.approx((0.05, 0.1, 0.05))
    ] * num_steps


def test_a_trajectory_takes_whole_steps_of_two_or_three_stages() -> None:
    lengths = (0.2, 1, 1.5, 3, 3.1, 4.5, 6.5, 127.5)
    counts = [num_trajectory_gradients(length, 1.0, dynamics="split") for length in lengths]
    assert counts == [1, 1, 2, 3, 4, 6, 8, 128]
    assert [num_trajectory_gradients(length, 1.0, dynamics="leapfrog") for length in (4.5, 200)] == [5, 128]
    assert num_trajectory_gradients(9.5, 1.0, dynamics="split", most=5) == 5


@pytest.mark.parametrize("num_steps", [3, 4])
def test_at_equal_gradients_steps_of_several_stages_keep_the_energy_better(num_steps: int) -> None:
    potential, z, momentum = start_of_a_trajectory()
    state = potential.state(z)
    size = TURN / num_steps
    end, turned = trajectory(potential, state, momentum, step_size=size, num_steps=num_steps, dynamics="split")
    plain, plainly = state, momentum
    for _ in range(num_steps):
        one = StepFactors(size / 2, size / 2, size, math.cos(size), math.sin(size))
        plain, plainly = integrate(potential, plain, plainly, one, is_split=True)
    before = total_energy(state.potential, momentum)
    errors = [
        (total_energy(at.potential, speed) - before).square().mean().sqrt()
        for at, speed in ((end, turned), (plain, plainly))
    ]
    assert errors[0] < 0.6 * errors[1]


def transition_by_hand(
    dynamics: str, step_size: float, seed: int, gradients: str = "float32"
) -> tuple[Any, dict[str, Tensor]]:
    """A transition of 400 chains, and from the same random numbers what each part of it should be."""
    potential, _, _ = start_of_a_trajectory()
    if gradients != "float32":
        coarse = CoarseGradient.about(potential.target, potential.mode, gradients)
        potential = replace(potential, coarse=coarse)
    z = 2 * torch.randn(400, 2, generator=seeded(seed), dtype=torch.float64)
    got = transition(potential, potential.state(z), seeded(seed), step_size, dynamics)
    generator = seeded(seed)
    momentum = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    unit = torch.rand(401, generator=generator, dtype=torch.float64)
    length = TURN * (JITTER[0] + (JITTER[1] - JITTER[0]) * float(unit[0]))
    options = {"step_size": length / got.num_steps, "num_steps": got.num_steps, "dynamics": dynamics}
    end, end_momentum = trajectory(potential, potential.state(z), momentum, **options)
    log_joint = potential.target.log_joint
    before = -log_joint(potential.theta(z)) + (momentum[:, 0] ** 2 + momentum[:, 1] ** 2) / 2
    after = -log_joint(potential.theta(end.z)) + (end_momentum[:, 0] ** 2 + end_momentum[:, 1] ** 2) / 2
    chance = torch.minimum((before - after).exp(), torch.ones(400, dtype=torch.float64))
    is_accepted = unit[1:] < chance
    return got, {"start": z, "end": end.z, "before": before, "after": after, "chance": chance, "accepted": is_accepted}


@every_dynamics
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_a_transition_accepts_by_the_exact_energy_and_tells_the_energy_of_where_it_is(
    dynamics: str, gradients: str
) -> None:
    got, hand = transition_by_hand(dynamics, 1.7, 3, gradients)
    accepted = hand["accepted"]
    assert 20 < int(accepted.sum()) < 380  # both kinds are there
    torch.testing.assert_close(got.acceptance, hand["chance"])
    torch.testing.assert_close(got.state.z, torch.where(accepted[:, None], hand["end"], hand["start"]))
    torch.testing.assert_close(got.energy, torch.where(accepted, hand["after"], hand["before"]))


@every_dynamics
def test_energies_kept_are_a_chi_square_above_the_potential(dynamics: str) -> None:
    """In equilibrium half the squared momentum of P coordinates has mean P / 2, kept moves or not."""
    target = make_target(LAYOUTS[0])
    result = run(target, gaussian_at_mode(target), dynamics, num_chains=256, num_warmup=30, num_draws=25)
    kinetic = (result.energy + result.log_joint).mean(dim=1)  # of each chain
    assert abs(float(kinetic.mean()) - 1) < 4 * float(kinetic.std()) / 16


@every_dynamics
def test_chains_on_a_gaussian_agree_and_are_nearly_independent(dynamics: str) -> None:
    layout = HeadLayout(1, 9)
    target = make_target(layout, likelihood_scale=0.0)
    result = run(target, gaussian_at_mode(target), dynamics, num_chains=16, num_warmup=60, num_draws=200)
    judged = convergence(result.draws.numpy())
    assert judged.r_hat < 1.01
    assert judged.ess_bulk > 1000


def test_what_the_run_tells_belongs_to_its_draws() -> None:
    target = make_target(LAYOUTS[0])
    result = run(target, gaussian_at_mode(target), num_chains=6, num_warmup=20, num_draws=30)
    expected = torch.stack([target.log_joint(chain.double()) for chain in result.draws])
    torch.testing.assert_close(result.log_joint, expected, rtol=1e-5, atol=1e-5)
    assert (result.energy + result.log_joint > 0).all()  # the kinetic part
    assert result.draws.shape == (6, 30, 2)
    assert result.draws.dtype == torch.float32
    assert result.n_steps.shape == result.diverging.shape == result.acceptance_rate.shape == (6, 30)
    assert not result.diverging.any()


def test_a_rejected_chain_stays() -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    wide = type(base.covariance)(3 * base.covariance.scale_tril)  # type: ignore[attr-defined]
    result = sample_hmc(
        target, mode=base.mean, covariance=wide, generator=seeded(), num_chains=8, num_warmup=0, num_draws=100
    )
    stayed = (result.draws.diff(dim=1) == 0).all(dim=2)
    assert 0 < int(stayed.sum()) < stayed.numel()
    assert (result.log_joint.diff(dim=1) == 0)[stayed].all()


def test_leapfrog_reaches_the_acceptance_asked_for() -> None:
    layout = HeadLayout(3, 10)
    features = torch.randn(100, 10, generator=seeded(), dtype=torch.float64)
    target = LastLayerTarget(features, (features[:, 0] > 0).long(), layout, Prior(0.3))
    base = gaussian_at_mode(target)
    for goal in (0.6, 0.9):
        result = sample_hmc(
            target, mode=base.mean, covariance=base.covariance, generator=seeded(), num_chains=16, num_warmup=60,
            num_draws=20, target_accept=goal, dynamics="leapfrog",
        )  # fmt: skip
        assert float(result.acceptance_rate.mean()) == pytest.approx(goal, abs=0.1)


def test_chains_that_all_diverge_are_an_error() -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    absurd = type(base.covariance)(1e6 * base.covariance.scale_tril)  # type: ignore[attr-defined]
    with pytest.raises(NumericError, match="every trajectory of every chain diverged"):
        sample_hmc(
            target, mode=base.mean, covariance=absurd, generator=seeded(), num_warmup=0, num_draws=3,
            dynamics="leapfrog",
        )  # fmt: skip


@pytest.mark.long
def test_nuts_has_the_moments_of_the_posterior_on_a_grid() -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    before = torch.get_rng_state()
    result = sample_nuts(
        target, mode=base.mean, covariance=base.covariance, seed=1, num_chains=12, num_warmup=20, num_draws=60
    )
    z = base.covariance.whiten(result.draws.double().flatten(0, 1) - base.mean).view(12, 60, 2)
    assert_moments(z, *grid_moments(target, base))
    assert torch.equal(torch.get_rng_state(), before)
    assert result.energy is None


def nearly_separable_target() -> LastLayerTarget:
    """A posterior whose curvature away from the mode is far above that at it: separable classes, weak prior."""
    layout = HeadLayout(4, 12)
    features = torch.randn(300, 12, generator=seeded(), dtype=torch.float64)
    return LastLayerTarget(features, (5 * features[:, :4]).argmax(dim=1), layout, Prior(1e-3))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_chain_stays_at_its_over_dispersed_start(seed: int) -> None:
    target = nearly_separable_target()
    base = gaussian_at_mode(target)
    result = sample_hmc(target, mode=base.mean, covariance=base.covariance, generator=seeded(seed), num_draws=15)
    assert float(result.acceptance_rate.mean(dim=1).min()) > 0.5
    assert int(result.diverging.sum()) == 0


def test_one_stuck_chain_shows_in_what_the_step_size_is_adapted_to() -> None:
    moving, stuck = torch.full((16,), 0.8, dtype=torch.float64), torch.tensor([0.8] * 15 + [0.0])
    assert adaptation_statistic(moving, 0.9 * moving, 0.8) == pytest.approx(0.72)
    assert adaptation_statistic(stuck, stuck, 0.8) < 0.02


def test_a_run_goes_on_until_its_draws_are_enough() -> None:
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)
    seen = []

    def is_enough(draws: Tensor) -> bool:
        seen.append(draws.shape[1])
        return draws.shape[1] >= 20

    options = {"mode": base.mean, "covariance": base.covariance, "num_chains": 3, "num_warmup": 5}
    long = sample_hmc(target, generator=seeded(), num_draws=8, is_enough=is_enough, **options)
    assert seen == [8, 12, 16, 20]
    assert torch.equal(long.draws, sample_hmc(target, generator=seeded(), num_draws=20, **options).draws)


def sample_until_fifth_look(dynamics: str, seen: list[int], store: MemoryDraws, resume: StopAt) -> HmcRun:
    """A run that is enough at its fifth look; the draws that each look saw are added to `seen`."""
    target = make_target(LAYOUTS[0])
    base = gaussian_at_mode(target)

    def is_enough(draws: Tensor) -> bool:
        seen.append(draws.shape[1])
        return len(seen) > 4

    return sample_hmc(
        target, mode=base.mean, covariance=Full(4 * base.covariance.scale_tril), generator=seeded(),  # type: ignore[attr-defined]
        num_chains=3, num_warmup=15, num_draws=8, is_enough=is_enough,
        dynamics=dynamics, store=store, resume=resume,
    )  # fmt: skip


@functools.cache
def uninterrupted(dynamics: str) -> HmcRun:
    seen: list[int] = []
    whole = sample_until_fifth_look(dynamics, seen, MemoryDraws(), StopAt())
    assert seen == [8, 12, 16, 20, 24]
    return whole


@every_dynamics
@pytest.mark.parametrize("stop_at", long_but([1, 7, 9, 18, 27, 33], 1, 18))
def test_an_interrupted_sampler_goes_on_to_the_same_bits(dynamics: str, stop_at: int) -> None:
    seen, store, cut = list[int](), MemoryDraws(), StopAt(stop_at)
    with pytest.raises(Interrupted):
        sample_until_fifth_look(dynamics, seen, store, cut)
    again = sample_until_fifth_look(dynamics, seen, store, StopAt(stored=cut.stored))
    assert seen == [8, 12, 16, 20, 24]
    whole = uninterrupted(dynamics)
    for name in ("draws", "log_joint", "energy", "acceptance_rate", "diverging", "n_steps"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
    assert again.step_size == whole.step_size


@pytest.mark.parametrize("has_own_generators", [False, True])
@pytest.mark.parametrize("stop_at", [18])
def test_an_interrupted_sampler_of_long_draws_goes_on_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, has_own_generators: bool, stop_at: int
) -> None:
    monkeypatch.setattr(random, "LARGE", 1)
    if has_own_generators:  # as a GPU has
        monkeypatch.setattr(
            random, "on_device", lambda generator, device: seeded(int(torch.randint(2**62, (1,), generator=generator)))
        )
    whole = sample_until_fifth_look("split", [], MemoryDraws(), StopAt())
    seen, store, cut = list[int](), MemoryDraws(), StopAt(stop_at)
    with pytest.raises(Interrupted):
        sample_until_fifth_look("split", seen, store, cut)
    again = sample_until_fifth_look("split", seen, store, StopAt(stored=cut.stored))
    assert torch.equal(again.draws, whole.draws)
    monkeypatch.undo()
    assert not torch.equal(whole.draws, uninterrupted("split").draws)


def test_many_parameters_are_whitened_in_single_precision_and_energies_stay_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = head_target(HeadLayout(3, 20), 200, labels=by_sign, prior=0.3, dtype=torch.float32)
    base = gaussian_at_mode(target)
    options = {"num_chains": 4, "num_warmup": 20, "num_draws": 60}
    plain = run(target, base, **options)
    monkeypatch.setattr("bnncli.inference.hmc._LARGE", 10)
    rough = run(target, base, **options)
    # The first transitions differ by rounding alone; what is told of each draw is the target's own there.
    assert torch.allclose(rough.draws[:, 0], plain.draws[:, 0], atol=1e-3)
    assert not torch.equal(rough.draws, plain.draws)
    told = target.log_joint(rough.draws.flatten(0, 1).double())
    torch.testing.assert_close(rough.log_joint.flatten(), told, rtol=1e-6, atol=1e-3)
    spread = [one.draws.double().flatten(0, 1).var(dim=0).mean() for one in (rough, plain)]
    assert float(spread[0] / spread[1]) == pytest.approx(1, abs=0.3)


def test_step_size_never_exceeds_one_trajectory() -> None:
    adaptation = StepSizeAdaptation.start(initial=0.4, target_accept=0.8)
    for _ in range(50):
        adaptation = adaptation.update(1.0)
    assert adaptation.final <= adaptation.current
    assert adaptation.current == pytest.approx(0.66 * math.pi)


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
