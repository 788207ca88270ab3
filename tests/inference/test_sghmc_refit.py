"""Stochastic-gradient chains of many targets at once are those of each; as many of them as give draws that are nearly independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems.heads import LAYOUTS, at_random, draw_examples
from problems.seeds import seeded

from bnncli.evaluation.convergence import RankLaw
from bnncli.inference import simulation
from bnncli.inference.dynamics import SomeDraws, WhiteCoordinates
from bnncli.inference.sghmc import SghmcPlan, SghmcRun, planned, sample_sghmc
from bnncli.inference.simulation import GaussianRefit, Problem, SghmcRefit, quantities, ranks_of
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior, initial_theta
from bnncli.targets.last_layer import LastLayerTarget

ALL = 10**9
PLAN = SghmcPlan(20, 1, 1, 10, ALL, 1.0, 0.2, temperature=0.0, is_cyclical=False)


def targets_of(layout: HeadLayout, num: int = 3) -> list[LastLayerTarget]:
    """The same features; the first has labels that are nearly all alike, so that their stiffness differs."""
    features, _ = draw_examples(layout, 30, at_random)
    sets = torch.randint(layout.num_classes, (num, 30), generator=seeded(1))
    sets[0, 3:] = 0
    return [LastLayerTarget(features, labels, layout, Prior(0.1)) for labels in sets]


CASES = {
    "base": SghmcRefit(PLAN, 2, from_initialisation=True, base=GaussianRefit()),
    "none": SghmcRefit(PLAN, 2, from_initialisation=True),
    "given": SghmcRefit(replace(PLAN, learning_rate=0.3), 2, is_given=True, from_initialisation=True),
    "rmsprop": SghmcRefit(replace(PLAN, is_preconditioned=True), 2, from_initialisation=True),
    "cyclical": SghmcRefit(
        replace(PLAN, num_cycles=2, num_exploring=5, is_cyclical=True),
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
        chosen = planned(
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
    plan = replace(PLAN, epochs=145, num_draws=27, temperature=1.0)
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
    ranked = quantities(layout, torch.randn(9, 5, generator=generator), seeded(4))
    ranks = ranks_of(problem, thetas, refit, ranked=ranked, num_draws=60, generator=generator)
    law = RankLaw(num, 60)
    return min(law.p_value(one) for one in ranks.numpy()) <= 0.002 / len(ranked)


WARM = SghmcPlan(1000, 1, 200, 300, ALL, 1.0, 0.2, is_cyclical=False)  # as fit-sghmc has it by default


def test_chains_that_are_too_cold_are_found() -> None:
    plan = replace(WARM, epochs=60, num_exploring=20, num_draws=40, temperature=0.1)
    assert ranks_are_doubted(SghmcRefit(plan, 4, base=GaussianRefit()), 15)


@pytest.mark.long
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


def test_draws_are_kept_from_all_over_a_cycle() -> None:
    """As often early as late, where a cycle's draws are not all alike."""
    plan = SghmcPlan(100, 4, 10, 5, 100, 1.0, 0.2)
    places = simulation._kept_places(plan, 500, 3, 2, seeded())
    assert places.shape == (6, 500)
    assert (places.diff(dim=0)[[0, 1, 3, 4]] >= 3).all()
    counts = torch.bincount(places.flatten(), minlength=40).view(4, 10)
    assert (counts[[0, 2]] == 0).all()
    assert (counts[[1, 3]] - 150).abs().max() < 4 * (150 * 0.7) ** 0.5


def test_a_store_keeps_the_draws_of_each_chain_whose_turn_it_is() -> None:
    draws, places = torch.randn(3, 5, 2, generator=seeded()), torch.tensor([[0, 1, 0], [4, 2, 3]])
    store = SomeDraws(places)
    for turn in range(5):
        store.append(draws[:, turn])
    torch.testing.assert_close(store.draws(), draws.gather(1, places.T.unsqueeze(2).expand(-1, -1, 2)))
