"""Simulation-based calibration of fits, latent binary ones too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from problems.long_run import long_but
from problems.seeds import seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bnncli.commands.fit_lbbnn import FitLbbnnOptions, build_start, make_plan
from bnncli.evaluation.convergence import RankLaw
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.simulation import (
    LOG_LIKELIHOOD,
    FlowRefit,
    GaussianRefit,
    HmcRefit,
    LatentRefit,
    Problem,
    RankedNumber,
    Refit,
    prior_draws,
    rank_quantities,
    ranked_quantities,
    simulate_labels,
)
from bnncli.latent.fit import Scaling, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab, bias_divergence, weight_divergence
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget

PRIOR = Prior(0.5)
LAYOUT = HeadLayout(3, 2)
NUM_DRAWS = 60
LEVEL = 0.002  # of all quantities together: what is right is doubted twice in a thousand seeds


def features(num_examples: int, num_features: int = 2) -> Tensor:
    return torch.randn(num_examples, num_features, generator=seeded())


def p_values(
    refit: Refit,
    *,
    num: int = 80,
    layout: HeadLayout = LAYOUT,
    num_examples: int = 60,
    observed: tuple[Tensor, Tensor] | None = None,
    thetas: Tensor | None = None,
) -> dict[str, float]:
    """By quantity, of the ranks of truths from the prior, or of those given."""
    generator = seeded(3)
    problem = Problem(features(num_examples, layout.num_features), layout, PRIOR, observed)
    if thetas is None:
        thetas = (
            torch.randn(num, layout.num_params, generator=generator, dtype=torch.float64)
            / PRIOR.diagonal(layout).sqrt()
        )
    ranked = ranked_quantities(layout, torch.randn(9, layout.num_features, generator=generator), seeded(4))
    ranks = rank_quantities(problem, thetas, refit, ranked=ranked, num_draws=NUM_DRAWS, generator=generator)
    law = RankLaw(len(thetas), NUM_DRAWS)
    return {one.name: law.p_value(some) for one, some in zip(ranked, ranks.numpy(), strict=True)}


def is_doubted(found: dict[str, float]) -> bool:
    return min(found.values()) <= LEVEL / len(found)


def changed(refit: Refit, change: Callable[[Sequence[LastLayerTarget], Tensor], Tensor]) -> Refit:
    def made(
        targets: Sequence[LastLayerTarget], num_draws: int, generator: torch.Generator, progress: Progress = SILENT
    ) -> Tensor:
        return change(targets, refit(targets, num_draws, generator, progress))

    return made


def halved_covariance(targets: Sequence[LastLayerTarget], draws: Tensor) -> Tensor:
    center = draws.mean(dim=1, keepdim=True)
    return center + (draws - center) * 0.5**0.5


def dropped_bias(targets: Sequence[LastLayerTarget], draws: Tensor) -> Tensor:
    """Draws of the posterior of a head without a bias, which is 0 then."""
    weight, bias = targets[0].layout.split(draws)
    assert bias is not None
    return targets[0].layout.join(weight, torch.zeros_like(bias))


def under_prior(refit: Refit, prior: Prior) -> Refit:
    def made(
        targets: Sequence[LastLayerTarget], num_draws: int, generator: torch.Generator, progress: Progress = SILENT
    ) -> Tensor:
        return refit([replace(one, prior=prior) for one in targets], num_draws, generator, progress)

    return made


class Once:
    """A fit whose draws of the first simulations are those of every later call: it must be given the same."""

    def __init__(self, refit: Refit) -> None:
        self.refit, self.draws = refit, torch.empty(0)

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        if not len(self.draws):
            self.draws = self.refit(targets, num_draws, generator, progress)
        return self.draws


EXACT = Once(HmcRefit())
WRONG = {
    "a covariance halved": changed(EXACT, halved_covariance),
    "a bias dropped": changed(EXACT, dropped_bias),
    "a prior five times as strong": under_prior(HmcRefit(), Prior(2.5)),
    "a diagonal covariance": GaussianRefit("diag"),
}


@pytest.mark.parametrize("wrong", long_but(WRONG, "a covariance halved", "a bias dropped"))
def test_a_fit_that_is_wrong_is_found_where_an_exact_one_passes(wrong: str) -> None:
    assert is_doubted(p_values(WRONG[wrong]))
    assert not is_doubted(p_values(EXACT))


def test_the_exact_sampler_of_one_logit_passes() -> None:
    assert not is_doubted(p_values(HmcRefit(), layout=HeadLayout(1, 2), num=60))


@pytest.mark.nightly
def test_the_exact_sampler_passes_a_thousand_simulations_of_a_small_head() -> None:
    assert not is_doubted(p_values(HmcRefit(), num=1000, layout=HeadLayout(3, 5), num_examples=100))


@pytest.mark.long
def test_a_flow_without_training_is_its_base() -> None:
    assert is_doubted(p_values(FlowRefit("diag", {"flow": "radial", "length": 1, "epochs": 1}), num=100))


@pytest.mark.long
def test_truths_of_a_posterior_pass_beside_its_data_and_not_without_them() -> None:
    theta = 4 * torch.randn(LAYOUT.num_params, generator=seeded(7), dtype=torch.float64)
    rows = features(80)
    observed = (rows, simulate_labels(LAYOUT, rows, theta, seeded(8)))
    target = LastLayerTarget(*observed, LAYOUT, PRIOR)
    gaussian = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).gaussian
    drawn = sample_hmc(
        target, mode=gaussian.mean, covariance=gaussian.covariance, generator=seeded(9), num_chains=80, num_draws=1
    )
    thetas = drawn.draws[:, 0].double()
    assert not is_doubted(p_values(HmcRefit(), num_examples=10, observed=observed, thetas=thetas))
    assert is_doubted(p_values(GaussianRefit(), num_examples=10, thetas=thetas))


@pytest.mark.parametrize(
    "layout", [HeadLayout(3, 2), HeadLayout(2, 2, has_bias=False), HeadLayout(1, 2), HeadLayout(2, 2, likelihood_name="multilabel")],
    ids=str,
)  # fmt: skip
def test_logits_that_are_ranked_are_those_that_the_data_can_tell(layout: HeadLayout) -> None:
    """Of several classes less their mean: a shift that all share changes no probability, only the prior knows of it."""
    held_out, theta = features(6), torch.randn(layout.num_params, generator=seeded(3), dtype=torch.float64)
    logits = layout.logits(held_out.double(), theta[None])[0]
    if layout.likelihood_name is None and layout.num_outputs > 1:
        logits = logits - logits.mean(dim=1, keepdim=True)
    ranked = ranked_quantities(layout, held_out, seeded(4), num_logits=6)
    found = [one for one in ranked if one.name.startswith("logit")]
    assert len(found) == 6
    for one in found:
        output, row = (int(word) for word in one.name.split() if word.isdigit())
        assert float(one.direction @ theta) == pytest.approx(float(logits[row, output]))


def test_draws_of_hmc_are_every_third_transition_of_each_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each whitened coordinate is t + 100 c, for transition t of chain c."""
    targets = [LastLayerTarget(features(20), torch.arange(20) % 3, LAYOUT, PRIOR)] * 2

    def transitions(*given: object, num_chains: int, num_draws: int, **others: object) -> SimpleNamespace:
        chain, step = torch.arange(num_chains).view(-1, 1, 1), torch.arange(num_draws).view(1, -1, 1)
        return SimpleNamespace(draws=(step + 100 * (chain // 2)).expand(-1, -1, LAYOUT.num_params).double())

    monkeypatch.setattr("bnncli.inference.simulation.sample_hmc", transitions)
    gaussian = fit_gaussian(targets[0], start=torch.zeros(LAYOUT.num_params)).gaussian
    expected = torch.tensor([2.0, 5, 8, 11, 102, 105, 108], dtype=torch.float64)  # four of each chain, of which seven
    for draws in HmcRefit(num_chains=2)(targets, 7, seeded()):
        found = gaussian.covariance.whiten(draws - gaussian.mean)
        torch.testing.assert_close(found, expected[:, None].expand_as(found), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "layout", [HeadLayout(3, 1), HeadLayout(1, 1), HeadLayout(2, 1, likelihood_name="multilabel")], ids=str
)
def test_labels_are_drawn_with_the_probabilities_of_their_classes(layout: HeadLayout) -> None:
    theta = torch.randn(layout.num_params, generator=seeded(5), dtype=torch.float64)
    num, likelihood = 20_000, layout.likelihood
    labels = simulate_labels(layout, torch.ones(num, 1), theta, seeded(6))
    logits = layout.logits(torch.ones(1, 1, dtype=torch.float64), theta.unsqueeze(0))[0]
    expected = likelihood.class_probabilities(logits, dim=1)[0]
    found = (
        labels.double() if labels.ndim == 2 else torch.nn.functional.one_hot(labels, likelihood.num_classes).double()
    )
    error = (expected * (1 - expected) / num).sqrt()
    assert ((found.mean(dim=0) - expected).abs() < 4 * error).all()


def test_equal_numbers_are_ranked_at_random() -> None:
    def stuck(
        targets: Sequence[LastLayerTarget], num_draws: int, generator: torch.Generator, progress: Progress = SILENT
    ) -> Tensor:
        return torch.zeros(len(targets), num_draws, LAYOUT.num_params, dtype=torch.float64)

    problem = Problem(features(5), LAYOUT, PRIOR)
    ranked = [RankedNumber("one", torch.eye(LAYOUT.num_params, dtype=torch.float64)[0])]
    thetas = torch.zeros(300, LAYOUT.num_params, dtype=torch.float64)
    ranks = rank_quantities(problem, thetas, stuck, ranked=ranked, num_draws=9, generator=seeded())
    assert RankLaw(300, 9).p_value(ranks[0].numpy()) > 0.001


CPU = torch.device("cpu")
NET = NetworkLayout((2, 1))
WIDER = NetworkLayout((5, 1))
SLAB = SpikeAndSlab.constant(1, inclusion=0.3, slab_mean=0.5, slab_sd=0.7, bias_sd=2.0)


def latent_features(num_examples: int, layout: NetworkLayout = NET) -> Tensor:
    return torch.randn(num_examples, layout.num_features, generator=seeded())


def start(options: FitLbbnnOptions, layout: NetworkLayout, count: int, generator: torch.Generator) -> LatentModel:
    num_repeats = count * options.repeats
    return build_start(options, layout, [1.0], num_repeats=num_repeats, generator=generator, device=CPU)


def refit_of(options: FitLbbnnOptions, layout: NetworkLayout, num_examples: int) -> LatentRefit:
    return LatentRefit(partial(start, options, layout), make_plan(options, num_examples))


def least_p_value(refit: Refit, *, num: int, num_examples: int, net: NetworkLayout = NET) -> float:
    """Of the quantities, times their number: ranks of truths whose weights are in with probability 1/2."""
    generator, layout = seeded(3), net.head
    assert layout is not None
    thetas = prior_draws(net, SpikeAndSlab.constant(1, inclusion=0.5), num, generator)
    ranked = ranked_quantities(layout, latent_features(9, net), seeded(4), of_labels=LOG_LIKELIHOOD)
    problem = Problem(latent_features(num_examples, net), layout, Prior(1.0))
    ranks = rank_quantities(problem, thetas, refit, ranked=ranked, num_draws=NUM_DRAWS, generator=generator)
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
    rows = 3 + 5 * latent_features(20)
    scaling, layout = Scaling.of(rows, CPU), NET.head
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
        return fit_latent(begun, latent_features(10), some, make_plan(options, 10), generator=seeded(4))[0].factors.mean

    own = means(torch.stack(labels, dim=1))
    assert own.equal(torch.stack([means(one)[repeat] for repeat, one in enumerate(labels)]))
    assert not own.equal(means(labels[0]))


def test_draws_are_of_each_targets_own_networks_in_turn() -> None:
    layout = NET.head
    assert layout is not None
    options = FitLbbnnOptions(epochs=40, learning_rate=0.1, repeats=2).resolved(30)
    targets = [LastLayerTarget(latent_features(30), torch.full((30,), label), layout, Prior(1.0)) for label in (0, 1)]
    draws = refit_of(options, NET, 30)(targets, 5, seeded(), SILENT)
    assert draws.shape == (2, 5, layout.num_params)
    assert (draws[0, :, -1] < 0).all()
    assert (draws[1, :, -1] > 0).all()
    distance = (draws[:, 2, -1] - draws[:, 0, -1]).abs()  # the same network again
    assert (distance < (draws[:, 1, -1] - draws[:, 0, -1]).abs()).all()


def test_the_log_likelihood_of_the_simulated_labels_is_ranked() -> None:
    layout, rows, thetas = NET.head, latent_features(30), prior_draws(NET, SLAB, 40, seeded(1))
    assert layout is not None
    draws, seen = prior_draws(NET, SLAB, 40 * 9, seeded(2)).unflatten(0, (40, 9)), []

    def refit(targets: Sequence[LastLayerTarget], num: int, stream: torch.Generator, progress: Progress) -> Tensor:
        seen.extend(one.labels for one in targets)
        return draws

    ranked = [RankedNumber(LOG_LIKELIHOOD)]
    problem = Problem(rows, layout, Prior(1.0))
    ranks = rank_quantities(problem, thetas, refit, ranked=ranked, num_draws=9, generator=seeded())[0]
    every = torch.cat([thetas.unsqueeze(1), draws], dim=1)
    logits = every[..., :2] @ rows.double().T + every[..., 2:]  # (M, 1 + L, N)
    labels = torch.stack(seen).double().unsqueeze(1).expand_as(logits)
    values = -binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(dim=2)
    assert ranks.equal((values[:, 1:] < values[:, :1]).sum(dim=1))
