"""Simulation-based calibration: an exact sampler passes; wrong covariances, priors and heads are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems.long_run import long_but
from problems.seeds import seeded
from torch import Tensor

from bnncli.evaluation.convergence import RankLaw
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.simulation import (
    FlowRefit,
    GaussianRefit,
    HmcRefit,
    Problem,
    RankedNumber,
    Refit,
    quantities,
    ranks_of,
    simulated_labels,
)
from bnncli.parameters.layouts import HeadLayout
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
    ranked = quantities(layout, torch.randn(9, layout.num_features, generator=generator), seeded(4))
    ranks = ranks_of(problem, thetas, refit, ranked=ranked, num_draws=NUM_DRAWS, generator=generator)
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


@pytest.mark.long
def test_the_exact_sampler_passes_a_thousand_simulations_of_a_small_head() -> None:
    assert not is_doubted(p_values(HmcRefit(), num=1000, layout=HeadLayout(3, 5), num_examples=100))


@pytest.mark.long
def test_a_flow_without_training_is_its_base() -> None:
    assert is_doubted(p_values(FlowRefit("diag", {"flow": "radial", "length": 1, "epochs": 1}), num=100))


@pytest.mark.long
def test_truths_of_a_posterior_pass_beside_its_data_and_not_without_them() -> None:
    theta = 4 * torch.randn(LAYOUT.num_params, generator=seeded(7), dtype=torch.float64)
    rows = features(80)
    observed = (rows, simulated_labels(LAYOUT, rows, theta, seeded(8)))
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
    ranked = quantities(layout, held_out, seeded(4), num_logits=6)
    found = [one for one in ranked if one.name.startswith("logit")]
    assert len(found) == 6
    for one in found:
        output, row = (int(word) for word in one.name.split() if word.isdigit())
        assert one.direction is not None
        assert float(one.direction @ theta) == pytest.approx(float(logits[row, output]))


def test_draws_of_hmc_are_every_third_transition_of_each_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transition t of chain c is told by theta itself: t + 100 c in each whitened coordinate."""
    targets = [LastLayerTarget(features(20), torch.arange(20) % 3, LAYOUT, PRIOR)] * 2

    def transitions(*given: object, num_chains: int, num_draws: int, **others: object) -> SimpleNamespace:
        chain, step = torch.arange(num_chains).view(-1, 1, 1), torch.arange(num_draws).view(1, -1, 1)
        return SimpleNamespace(draws=(step + 100 * (chain // 2)).expand(-1, -1, LAYOUT.num_params).double())

    monkeypatch.setattr("bnncli.inference.simulation.sample_hmc", transitions)
    draws = HmcRefit(num_chains=2)(targets, 7, seeded())
    gaussian = fit_gaussian(targets[0], start=torch.zeros(LAYOUT.num_params)).gaussian
    for one in draws:
        found = gaussian.covariance.whiten(one - gaussian.mean)
        expected = torch.tensor(
            [2.0, 5, 8, 11, 102, 105, 108], dtype=torch.float64
        )  # four of each chain, of which seven
        torch.testing.assert_close(found, expected[:, None].expand_as(found), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "layout", [HeadLayout(3, 1), HeadLayout(1, 1), HeadLayout(2, 1, likelihood_name="multilabel")], ids=str
)
def test_labels_are_drawn_with_the_probabilities_of_their_classes(layout: HeadLayout) -> None:
    theta = torch.randn(layout.num_params, generator=seeded(5), dtype=torch.float64)
    num, likelihood = 20_000, layout.likelihood
    labels = simulated_labels(layout, torch.ones(num, 1), theta, seeded(6))
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
    ranks = ranks_of(problem, thetas, stuck, ranked=ranked, num_draws=9, generator=seeded())
    assert RankLaw(300, 9).p_value(ranks[0].numpy()) > 0.001
