"""Fits of fit-lbbnn to simulated labels: truths from the spike and slab, each network its own labels, a wrong prior is found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bnncli.commands.fit_lbbnn import FitLbbnnOptions, plan_of, start_of
from bnncli.evaluation.convergence import RankLaw
from bnncli.inference.simulation import (
    LOG_LIKELIHOOD,
    LatentRefit,
    Problem,
    RankedNumber,
    Refit,
    prior_draws,
    quantities,
    ranks_of,
)
from bnncli.latent.fit import Scaling, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab, bias_divergence, weight_divergence
from bnncli.parameters.layouts import NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget

CPU = torch.device("cpu")
NET = NetworkLayout((2, 1))
WIDER = NetworkLayout((5, 1))
NUM_DRAWS = 60
LEVEL = 0.002  # of all quantities together
SLAB = SpikeAndSlab.constant(1, inclusion=0.3, slab_mean=0.5, slab_sd=0.7, bias_sd=2.0)


def features(num_examples: int, layout: NetworkLayout = NET) -> Tensor:
    return torch.randn(num_examples, layout.num_features, generator=seeded())


def start(options: FitLbbnnOptions, layout: NetworkLayout, count: int, generator: torch.Generator) -> LatentModel:
    num_repeats = count * options.repeats
    return start_of(options, layout, [1.0], num_repeats=num_repeats, generator=generator, device=CPU)


def refit_of(options: FitLbbnnOptions, layout: NetworkLayout, num_examples: int) -> LatentRefit:
    return LatentRefit(partial(start, options, layout), plan_of(options, num_examples))


def least_p_value(refit: Refit, *, num: int, num_examples: int, net: NetworkLayout = NET) -> float:
    """Of the quantities, times their number: ranks of truths whose weights are in with probability 1/2."""
    generator, layout = seeded(3), net.head
    assert layout is not None
    thetas = prior_draws(net, SpikeAndSlab.constant(1, inclusion=0.5), num, generator)
    ranked = quantities(layout, features(9, net), seeded(4), of_labels=LOG_LIKELIHOOD)
    problem = Problem(features(num_examples, net), layout, Prior(1.0))
    ranks = ranks_of(problem, thetas, refit, ranked=ranked, num_draws=NUM_DRAWS, generator=generator)
    assert ranked[0].name == "log likelihood"
    return len(ranked) * min(RankLaw(num, NUM_DRAWS).p_value(one.numpy()) for one in ranks)


def exact(
    inclusion: float,
    targets: Sequence[LastLayerTarget],
    num_draws: int,
    generator: torch.Generator,
    progress: Progress = SILENT,
) -> Tensor:
    """Draws of the posteriors under a spike and slab: the prior's, chosen again by their likelihoods."""
    prior = SpikeAndSlab.constant(1, inclusion=inclusion)
    found = []
    for target in targets:
        thetas = prior_draws(NET, prior, 2500, generator)
        weights = target.log_likelihood(thetas).softmax(dim=0)
        found.append(thetas[torch.multinomial(weights, num_draws, replacement=True, generator=generator)])
    return torch.stack(found)


def test_exact_draws_pass_and_those_under_another_inclusion_do_not() -> None:
    assert least_p_value(partial(exact, 0.5), num=80, num_examples=15) > LEVEL
    assert least_p_value(partial(exact, 0.05), num=80, num_examples=15) < LEVEL


def test_a_fit_told_the_wrong_inclusion_is_rejected_and_one_told_the_right_passes() -> None:
    told = [FitLbbnnOptions(prior_inclusion=one, epochs=100, learning_rate=0.3).resolved(60) for one in (0.5, 0.05)]
    right, wrong = (least_p_value(refit_of(one, WIDER, 60), num=50, num_examples=60, net=WIDER) for one in told)
    assert right > LEVEL
    assert wrong < LEVEL


def test_factors_that_are_the_prior_have_no_divergence_from_it() -> None:
    layout = NetworkLayout((4, 3, 2))
    parts = (torch.tensor([one], dtype=torch.float64) for one in ([0.1, 0.3], [0.2, -0.1], [0.7, 1.3]))
    prior = SpikeAndSlab(*parts, bias_sd=0.8)
    factors = LatentModel.of_prior(layout, prior).factors
    assert weight_divergence(factors, prior, layout).abs().max() < 1e-12
    assert bias_divergence(factors.bias_mean, factors.bias_rho, prior, layout).abs().max() < 1e-12


def test_truths_have_the_moments_of_the_spike_and_slab() -> None:
    num = 40_000
    weight, bias = prior_draws(NET, SLAB, num, seeded()).split([2, 1], dim=1)
    slab = weight[weight != 0]
    assert abs(len(slab) / (2 * num) - 0.3) < 4 * (0.3 * 0.7 / (2 * num)) ** 0.5
    assert abs(float(slab.mean()) - 0.5) < 4 * 0.7 / len(slab) ** 0.5
    assert abs(float(slab.std()) - 0.7) < 4 * 0.7 / (2 * len(slab)) ** 0.5
    assert abs(float(bias.mean())) < 4 * 2 / num**0.5
    assert abs(float(bias.std()) - 2) < 4 * 2 / (2 * num) ** 0.5


def test_truths_of_scaled_features_are_told_for_features_as_they_are() -> None:
    rows = 3 + 5 * features(20)
    scaling, layout = Scaling.of(rows, CPU), NET.head
    assert layout is not None
    plain, scaled = prior_draws(NET, SLAB, 9, seeded(1)), prior_draws(NET, SLAB, 9, seeded(1), scaling)
    expected = layout.logits(scaling(rows).double(), plain)
    torch.testing.assert_close(layout.logits(rows.double(), scaled), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["lrt", "concrete", "mnf"])
@pytest.mark.parametrize(("sizes", "name"), [((2, 1), None), ((2, 3), None), ((2, 3), "multilabel")])
def test_each_network_learns_from_its_own_labels_alone(
    sizes: tuple[int, ...], name: str | None, estimator: str
) -> None:
    layout = NetworkLayout(sizes, name)
    options = FitLbbnnOptions(estimator=estimator, epochs=3, batch_size=4, repeats=2).resolved(10)
    shape = (10,) if name is None else (10, 3)
    labels = [
        torch.randint(2, shape, generator=seeded(seed)).to(torch.int64 if name is None else torch.uint8)
        for seed in (1, 2)
    ]

    def means(some: Tensor) -> Tensor:
        begun = start(options, layout, 1, seeded(3))
        return fit_latent(begun, features(10), some, plan_of(options, 10), generator=seeded(4))[0].factors.mean

    own = means(torch.stack(labels, dim=1))
    assert own.equal(torch.stack([means(one)[repeat] for repeat, one in enumerate(labels)]))
    assert not own.equal(means(labels[0]))


def test_draws_are_of_each_targets_own_networks_in_turn() -> None:
    layout = NET.head
    assert layout is not None
    options = FitLbbnnOptions(epochs=40, learning_rate=0.1, repeats=2).resolved(30)
    targets = [LastLayerTarget(features(30), torch.full((30,), label), layout, Prior(1.0)) for label in (0, 1)]
    draws = refit_of(options, NET, 30)(targets, 5, seeded(), SILENT)
    assert draws.shape == (2, 5, layout.num_params)
    assert (draws[0, :, -1] < 0).all()
    assert (draws[1, :, -1] > 0).all()
    distance = (draws[:, 2, -1] - draws[:, 0, -1]).abs()  # the same network again
    assert (distance < (draws[:, 1, -1] - draws[:, 0, -1]).abs()).all()


def test_the_log_likelihood_of_the_simulated_labels_is_ranked() -> None:
    layout, rows, thetas = NET.head, features(30), prior_draws(NET, SLAB, 40, seeded(1))
    assert layout is not None
    draws, seen = prior_draws(NET, SLAB, 40 * 9, seeded(2)).unflatten(0, (40, 9)), []

    def refit(targets: Sequence[LastLayerTarget], num: int, stream: torch.Generator, progress: Progress) -> Tensor:
        seen.extend(one.labels for one in targets)
        return draws

    ranked = [RankedNumber(LOG_LIKELIHOOD)]
    problem = Problem(rows, layout, Prior(1.0))
    ranks = ranks_of(problem, thetas, refit, ranked=ranked, num_draws=9, generator=seeded())[0]
    every = torch.cat([thetas.unsqueeze(1), draws], dim=1)
    logits = every[..., :2] @ rows.double().T + every[..., 2:]  # (M, 1 + L, N)
    labels = torch.stack(seen).double().unsqueeze(1).expand_as(logits)
    values = -binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(dim=2)
    assert ranks.equal((values[:, 1:] < values[:, :1]).sum(dim=1))
