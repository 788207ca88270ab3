"""SGHMC and SGLD: stationary moments, how far apart draws are, and refits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems.heads import LAYOUTS, at_random, by_noisy_sign, draw_examples, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.errors import NumericError
from bnncli.evaluation.convergence import RankLaw
from bnncli.inference import simulation
from bnncli.inference.dynamics import DrawSubset, MemoryDraws, WhiteCoordinates
from bnncli.inference.sghmc import (
    SghmcPlan,
    SghmcRun,
    largest_curvature,
    mean_square,
    num_independent_draws,
    plan_chains,
    preconditioner,
    sample_sghmc,
    variance_inflation,
)
from bnncli.inference.simulation import GaussianRefit, Problem, SghmcRefit, rank_quantities, ranked_quantities
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior, initial_theta
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.full import Full
from bnncli.targets.last_layer import LastLayerTarget

N = 12
ALL = 10**6
PLAN = SghmcPlan(150, 1, 10, 45, ALL, 0.5, 0.5, is_cyclical=False)


def gaussian_target() -> LastLayerTarget:
    """The prior alone, N(0, diag(1/4, 1/4, 1)): weights with precision 4, biases with 1."""
    return head_target(HeadLayout(1, 2), N, prior=Prior(4.0, 1.0), likelihood_scale=0.0)


def draws_of(
    target: LastLayerTarget,
    plan: SghmcPlan,
    num_chains: int = 400,
    start: float = 0.0,
    whitening: WhiteCoordinates | None = None,
) -> Tensor:
    zeros = torch.full((num_chains, target.layout.num_params), start, dtype=torch.float64)
    return sample_sghmc(target, plan, start=zeros, generator=seeded(), whitening=whitening).draws.double()


def whitening_by(base: Gaussian) -> WhiteCoordinates:
    return WhiteCoordinates.of(base, "cpu", torch.float64)


def assert_variances(draws: Tensor, expected: Tensor) -> None:
    """Of draws (C, T, P), within 4 standard errors between chains, and means at zero."""
    second = draws.square().mean(dim=1)
    error = second.std(dim=0) / math.sqrt(len(draws))
    assert ((second.mean(dim=0) - expected).abs() < 4 * error).all(), (second.mean(dim=0), expected, error)
    first = draws.mean(dim=1)
    assert (first.mean(dim=0).abs() < 4 * first.std(dim=0) / math.sqrt(len(draws))).all()


@pytest.mark.parametrize("decay", [0.2, 1.0])
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.25, marks=pytest.mark.long)])
@pytest.mark.parametrize("rate", [0.6, 3.0])
def test_variances_on_a_gaussian_are_those_of_the_formula(decay: float, temperature: float, rate: float) -> None:
    plan = replace(PLAN, momentum_decay=decay, temperature=temperature, learning_rate=rate)
    h = torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)
    expected = temperature / h / (1 - rate / N * h / (2 * (2 - decay)))
    assert_variances(draws_of(gaussian_target(), plan), expected)
    assert variance_inflation(plan, 4.0, N, rate)[0] == pytest.approx(float(expected[0] * 4 / temperature) - 1)


def test_in_the_coordinates_of_a_gaussian_the_variances_are_those_of_its_directions() -> None:
    """Of N(0, diag(1/4, 1/4, 1)) by the covariance of another, S = L L^T: the formula holds for each eigenvector of L^T H L."""
    root = torch.tensor([[0.5, 0.0, 0.0], [0.3, 0.6, 0.0], [-0.4, 0.2, 0.9]], dtype=torch.float64)
    target, plan = gaussian_target(), replace(PLAN, learning_rate=6.0, momentum_decay=0.3)
    base = Gaussian(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), Full(root), target.layout)
    draws = draws_of(target, plan, whitening=whitening_by(base))
    values, vectors = torch.linalg.eigh(root.T @ torch.diag(torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)) @ root)
    along = torch.linalg.solve_triangular(root, draws.unsqueeze(-1), upper=False).squeeze(-1) @ vectors
    assert_variances(along, 1 / values / (1 - 6.0 / N * values / (2 * (2 - 0.3))))


def test_a_cycle_explores_without_noise_and_samples_at_its_end() -> None:
    """With no noise at all the chains would fall to zero and stay; all that they have at a cycle's end comes of its last part."""
    plan = SghmcPlan(20, 2, 3, 7, ALL, 1.0, 0.9)
    assert [epoch for epoch in range(20) if plan.is_kept(epoch)] == [7, 8, 9, 17, 18, 19]
    assert [epoch for epoch in range(20) if not plan.is_exploring(epoch)] == [7, 8, 9, 17, 18, 19]
    draws = draws_of(gaussian_target(), replace(plan, epochs=300, num_exploring=75), 200, start=3.0)
    rate = 0.5 / N * torch.tensor([4.0, 4.0, 1.0])  # at most, while draws are kept
    assert (draws.var(dim=(0, 1)) * torch.tensor([4.0, 4.0, 1.0]) < 1.25 * (1 + rate)).all()
    assert (draws.var(dim=(0, 1)) * torch.tensor([4.0, 4.0, 1.0]) > 0.6).all()
    silent = draws_of(gaussian_target(), replace(plan, epochs=400, num_exploring=100, temperature=0.0), 3, start=3.0)
    assert silent.abs().max() < 1e-3


@pytest.mark.long
def test_minibatches_add_no_more_variance_than_is_said_and_much_of_it() -> None:
    """Over whole epochs the noise of shuffled batches cancels: chains that remember longer have less."""
    target = head_target(HeadLayout(1, 1, has_bias=False), 1000, labels=by_noisy_sign, prior=1.0)
    base = gaussian_at_mode(target)
    stiffness = float(base.covariance.unwhiten(torch.ones(1, 1, dtype=torch.float64))) ** -2
    plan = SghmcPlan(30, 1, 24, 6, 10, 0.02 * 1000 / stiffness, 0.5, is_cyclical=False)
    draws = sample_sghmc(target, plan, start=base.mean.expand(30, -1), generator=seeded()).draws
    by_length, by_batches = variance_inflation(plan, stiffness, 1000, plan.learning_rate)
    assert by_batches == pytest.approx(0.02 * 99, rel=1e-6)
    found = float((draws.double() - base.mean).square().mean()) * stiffness
    assert 1 + 0.3 * by_batches < found < (1 + by_length) * (1 + 1.1 * by_batches)


@pytest.mark.parametrize("is_whitened", [False, True])
@pytest.mark.long
def test_logistic_moments_are_those_of_importance_weights(is_whitened: bool) -> None:
    target = head_target(HeadLayout(1, 2), 60, labels=by_noisy_sign, prior=0.5)
    base = gaussian_at_mode(target)
    noise = base.noise(20_000, seeded(5))
    theta, log_density = base.from_noise(noise)
    weights = (target.log_joint(theta) - log_density).softmax(dim=0)
    mean = weights @ theta
    whitening = whitening_by(base) if is_whitened else None
    stiffness = largest_curvature(target, base.mean, seeded(), whitening=whitening)
    plan = SghmcPlan(500, 1, 20, 150, ALL, 0.02 * 60 / stiffness, 0.2, is_cyclical=False)
    draws = draws_of(target, plan, 150, whitening=whitening)
    first = draws.mean(dim=1)
    error = first.std(dim=0) / math.sqrt(len(draws))
    spread = (weights @ (theta - mean).square()).sqrt()
    assert ((first.mean(dim=0) - mean).abs() < 4 * error + 0.02 * spread).all()
    found = (draws - mean).square().mean(dim=(0, 1)).sqrt()
    torch.testing.assert_close(found, spread, rtol=0.05, atol=0)


def test_the_stiffness_is_the_largest_eigenvalue() -> None:
    target = head_target(HeadLayout(3, 4), 50)
    base = gaussian_at_mode(target)
    product = target.hessian_operator(base.mean)
    hessian = product(torch.eye(15, dtype=torch.float64))
    assert largest_curvature(target, base.mean, seeded()) == pytest.approx(
        float(torch.linalg.eigvalsh(hessian)[-1]), rel=0.03
    )
    scale = preconditioner(mean_square(target, base.mean, 10, seeded())[0])
    assert scale.mean() == pytest.approx(1)
    scaled = scale.sqrt().unsqueeze(1) * hessian * scale.sqrt()
    expected = float(torch.linalg.eigvalsh(scaled)[-1])
    assert largest_curvature(target, base.mean, seeded(), scale) == pytest.approx(expected, rel=0.03)
    root = (
        torch.eye(15, dtype=torch.float64) + 0.3 * torch.randn(15, 15, generator=seeded(), dtype=torch.float64).tril()
    )
    expected = float(torch.linalg.eigvalsh(root.T @ hessian @ root)[-1])
    whitening = whitening_by(Gaussian(base.mean, Full(root), base.layout))
    found = largest_curvature(target, base.mean, seeded(), whitening=whitening)
    assert found == pytest.approx(expected, rel=0.03)


def test_a_preconditioner_that_stands_still_keeps_the_gaussian() -> None:
    plan = replace(PLAN, is_preconditioned=True, learning_rate=0.6, num_exploring=75)
    zeros = torch.zeros(400, 3, dtype=torch.float64)
    square = torch.tensor([1.0, 4.0, 0.25])
    draws = sample_sghmc(gaussian_target(), plan, start=zeros, generator=seeded(), square=square).draws.double()
    assert_variances(draws, torch.tensor([0.25, 0.25, 1.0], dtype=torch.float64) * 1.02)


def test_a_resumed_run_has_the_same_draws() -> None:
    target, start = head_target(HeadLayout(3, 4), 40, dtype=torch.float32), torch.zeros(3, 15)
    plan, states, store = SghmcPlan(12, 2, 2, 3, 7, 0.1, 0.3), [], MemoryDraws()
    whole = sample_sghmc(target, plan, start=start, generator=seeded(), save=lambda state, _: states.append(state))
    middle = next(state for state in states if len(state["num_steps"]) > 0)
    for draw in whole.draws[:, : len(middle["num_steps"])].unbind(dim=1):
        store.append(draw)
    again = sample_sghmc(target, plan, start=start + 9, generator=seeded(8), store=store, state=middle)
    assert torch.equal(again.draws, whole.draws)
    assert torch.equal(again.history, whole.history)


def test_chains_that_fly_away_are_told_with_the_option_that_helps() -> None:
    plan = replace(PLAN, learning_rate=50.0)
    with pytest.raises(NumericError, match="diverged") as caught:
        draws_of(gaussian_target(), plan, 3, start=1.0)
    assert "learning_rate" in str(caught.value.hint)


NUM_EXAMPLES = 100
RATE_PLAN = SghmcPlan(1000, 1, 700, 300, NUM_EXAMPLES, 17.0, 0.2, is_cyclical=False)


def left_after(num_epochs: int, decay: float, reach: float, num_batches: int = 1) -> float:
    """What is left of where a chain was in a direction, by the motion of position and momentum itself."""
    motion = torch.tensor([[1 - reach, 1 - decay], [-reach, 1 - decay]], dtype=torch.float64)
    return float(torch.linalg.eigvals(motion).abs().max() ** (num_epochs * num_batches))


@pytest.mark.parametrize(("decay", "curvature"), [(0.2, 1.0), (0.2, 0.02), (1.0, 1.0), (0.05, 0.004)])
def test_draws_are_apart_where_a_tenth_is_left(decay: float, curvature: float) -> None:
    plan = SghmcPlan(1000, 1, 700, 300, NUM_EXAMPLES, 17.0, decay, is_cyclical=False)
    found, in_turn = num_independent_draws(plan, curvature, NUM_EXAMPLES)
    spacing = 700 // found
    assert in_turn == 1
    assert (
        left_after(spacing, decay, 0.17 * curvature)
        <= 0.1
        < left_after(700 // (found + 1) - 1, decay, 0.17 * curvature)
    )


def test_an_epoch_of_more_steps_forgets_more() -> None:
    plan = SghmcPlan(1000, 1, 700, 300, NUM_EXAMPLES // 4, 17.0, 0.2, is_cyclical=False)
    assert num_independent_draws(plan, 1.0, NUM_EXAMPLES)[0] == pytest.approx(
        4 * num_independent_draws(RATE_PLAN, 1.0, NUM_EXAMPLES)[0], rel=0.2
    )


def test_draws_are_of_those_that_the_plan_keeps() -> None:
    """Of 700 epochs the last 600."""
    plan = SghmcPlan(1000, 1, 200, 300, NUM_EXAMPLES, 17.0, 0.2, is_cyclical=False)
    assert num_independent_draws(RATE_PLAN, 1.0, NUM_EXAMPLES)[0] == 700 // 21
    assert num_independent_draws(plan, 1.0, NUM_EXAMPLES)[0] == 600 // 21


@pytest.mark.parametrize("curvature", [0.0, 1e-4])
def test_of_chains_that_do_not_forget_one_draw_is_kept(curvature: float) -> None:
    assert num_independent_draws(RATE_PLAN, curvature, NUM_EXAMPLES) == (1, 1)


def test_the_end_of_a_cycle_forgets_less_than_its_start_and_short_cycles_are_taken_in_turn() -> None:
    cyclical = SghmcPlan(1000, 4, 50, 0, NUM_EXAMPLES, 17.0, 1.0)
    steady = SghmcPlan(1000, 4, 50, 0, NUM_EXAMPLES, 17.0, 1.0, is_cyclical=False)
    assert (
        1 <= num_independent_draws(cyclical, 1.0, NUM_EXAMPLES)[0] < num_independent_draws(steady, 1.0, NUM_EXAMPLES)[0]
    )
    rate = math.log(10) / 0.17 / 0.5 / 10  # of cycles of 10 epochs one forgets a tenth of the way in e-foldings
    short = SghmcPlan(1000, 100, 1, 5, NUM_EXAMPLES, 17.0, 1.0)
    found, in_turn = num_independent_draws(short, rate / 3, NUM_EXAMPLES)
    assert found == 1
    assert in_turn in (3, 4)
    assert num_independent_draws(short, 0.0, NUM_EXAMPLES) == (1, 100)


WHOLE = 10**9
REFIT_PLAN = SghmcPlan(20, 1, 1, 10, WHOLE, 1.0, 0.2, temperature=0.0, is_cyclical=False)


def targets_of(layout: HeadLayout, num: int = 3) -> list[LastLayerTarget]:
    """The same features; the first has labels that are nearly all alike, so that their stiffness differs."""
    features, _ = draw_examples(layout, 30, at_random)
    sets = torch.randint(layout.num_classes, (num, 30), generator=seeded(1))
    sets[0, 3:] = 0
    return [LastLayerTarget(features, labels, layout, Prior(0.1)) for labels in sets]


CASES = {
    "base": SghmcRefit(REFIT_PLAN, 2, from_initialisation=True, base=GaussianRefit()),
    "none": SghmcRefit(REFIT_PLAN, 2, from_initialisation=True),
    "given": SghmcRefit(replace(REFIT_PLAN, learning_rate=0.3), 2, is_given=True, from_initialisation=True),
    "rmsprop": SghmcRefit(replace(REFIT_PLAN, is_preconditioned=True), 2, from_initialisation=True),
    "cyclical": SghmcRefit(
        replace(REFIT_PLAN, num_cycles=2, num_exploring=5, is_cyclical=True),
        2,
        from_initialisation=True,
        base=GaussianRefit("diag"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_without_noise_each_chain_goes_as_it_would_alone(case: str) -> None:
    refit, targets, num_draws = CASES[case], targets_of(LAYOUTS[0]), 4
    found = refit(targets, num_draws, seeded(5))
    generator, bases = (
        seeded(5),
        GaussianRefit(refit.base.structure).gaussians(targets, seeded()) if refit.base else None,
    )
    starts = initial_theta(targets[0].layout, 4 * 3, int(torch.randint(2**31, (1,), generator=generator)))
    for index, target in enumerate(targets):
        start = starts.view(3, 4, -1)[index]
        whitening = None if bases is None else WhiteCoordinates.of(bases[index], "cpu", torch.float64)
        chosen = plan_chains(
            target,
            lambda rate: replace(refit.plan, learning_rate=rate, batch_size=30),
            places=[start[0]] if bases is None else [start[0], bases[index].mean],
            learning_rate=0.3 if refit.is_given else None,
            whitening=whitening,
            squares=generator,
            generator=generator,
        )  # fmt: skip
        alone = sample_sghmc(
            target, chosen.plan, start=start, generator=seeded(), square=chosen.square, whitening=whitening
        ).draws
        # nothing is known to forget in so short a time: one draw of each of four chains
        torch.testing.assert_close(found[index].float(), alone[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_draws", "base", "expected"),
    [(9, "full", (2, 5)), (9, "diag", (9, 1)), (40, "full", (7, 6)), (2, "full", (2, 1))],
)
def test_there_are_as_many_chains_as_give_draws_that_are_apart(
    num_draws: int, base: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """135 epochs have time for six draws that forget one another."""
    shapes = []

    def sampled(*words: object, **given: object) -> SghmcRun:
        drawn = sample_sghmc(*words, **given)  # type: ignore[arg-type]
        shapes.append(drawn.draws.shape[:2])
        return drawn

    monkeypatch.setattr(simulation, "sample_sghmc", sampled)
    plan = replace(REFIT_PLAN, epochs=145, num_draws=27, temperature=1.0)
    targets = targets_of(LAYOUTS[0])
    draws = SghmcRefit(plan, 2, base=GaussianRefit(base))(targets, num_draws, seeded())
    assert shapes == [(3 * expected[0], expected[1])]
    assert draws.shape == (3, num_draws, 15)
    assert len(torch.unique(draws.flatten(0, 1), dim=0)) == 3 * num_draws


def ranks_are_doubted(refit: SghmcRefit, num: int) -> bool:
    """Of truths from the prior of a head of three classes and five features on 100 examples."""
    layout, prior, generator = HeadLayout(3, 5), Prior(0.5), seeded(3)
    problem = Problem(draw_examples(layout, 100, at_random, dtype=torch.float32)[0], layout, prior)
    thetas = (
        torch.randn(num, layout.num_params, generator=generator, dtype=torch.float64) / prior.diagonal(layout).sqrt()
    )
    ranked = ranked_quantities(layout, torch.randn(9, 5, generator=generator), seeded(4))
    ranks = rank_quantities(problem, thetas, refit, ranked=ranked, num_draws=60, generator=generator)
    law = RankLaw(num, 60)
    return min(law.p_value(one) for one in ranks.numpy()) <= 0.002 / len(ranked)


WARM = SghmcPlan(1000, 1, 200, 300, WHOLE, 1.0, 0.2, is_cyclical=False)  # as fit-sghmc has it by default


def test_chains_that_are_too_cold_are_found() -> None:
    plan = replace(WARM, epochs=60, num_exploring=20, num_draws=40, temperature=0.1)
    assert ranks_are_doubted(SghmcRefit(plan, 4, base=GaussianRefit()), 15)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "refit",
    [
        SghmcRefit(replace(WARM, learning_rate=3.4), 4, is_given=True, base=GaussianRefit()),
        SghmcRefit(replace(WARM, momentum_decay=0.05), 4),
    ],
    ids=["short steps", "no preconditioner"],
)
def test_chains_at_the_posteriors_temperature_pass(refit: SghmcRefit) -> None:
    """By default the 5 % that the length of steps may add, along all whitened directions, would show in the log joint."""
    assert not ranks_are_doubted(refit, 200)


def test_a_store_keeps_the_draws_of_each_chain_whose_turn_it_is() -> None:
    draws, places = torch.randn(3, 5, 2, generator=seeded()), torch.tensor([[0, 1, 0], [4, 2, 3]])
    store = DrawSubset(places)
    for turn in range(5):
        store.append(draws[:, turn])
    torch.testing.assert_close(store.draws(), draws.gather(1, places.T.unsqueeze(2).expand(-1, -1, 2)))


def test_draws_are_kept_from_all_over_a_cycle() -> None:
    """As often early as late, where a cycle's draws are not all alike."""
    plan = SghmcPlan(100, 4, 10, 5, 100, 1.0, 0.2)
    places = simulation._kept_places(plan, 500, 3, 2, seeded())
    assert places.shape == (6, 500)
    assert (places.diff(dim=0)[[0, 1, 3, 4]] >= 3).all()
    counts = torch.bincount(places.flatten(), minlength=40).view(4, 10)
    assert (counts[[0, 2]] == 0).all()
    assert (counts[[1, 3]] - 150).abs().max() < 4 * (150 * 0.7) ** 0.5
