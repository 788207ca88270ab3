"""The climb to a prior precision: where it ends, what it does not take for a gain, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from torch import Tensor

from bnncli.errors import NumericError
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_variants import STEP, PriorTrial, search_prior
from bnncli.inference.refine import fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget


def trials_of(
    loss: Callable[[float], float], *, limit: float = 1e9
) -> Callable[[float, PriorTrial | None], PriorTrial]:
    """Trials whose mean loss is a function of the log precision, of 400 examples."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        return PriorTrial(precision, loss(math.log(precision)) * shares / shares.mean(), 1.0, limit)

    return try_at


@pytest.mark.parametrize("best", [-6.0, -1.0, 0.0, 2.0, 7.0])
def test_the_best_precision_is_found_to_half_a_decade_from_either_side(best: float) -> None:
    found = search_prior(trials_of(lambda log: 1 + (log - best) ** 2), 1.0)
    assert abs(math.log(found.best.precision) - best) <= STEP
    assert not found.is_cut
    assert found.curve == sorted(found.curve)
    assert found.trials[0].precision == 1.0


def test_what_gains_less_than_counts_leaves_the_precision_as_it_is() -> None:
    flat = search_prior(trials_of(lambda log: 1 + 0.004 * log), 3.0)
    assert flat.best.precision == 3.0
    assert len(flat.trials) == 3  # one on either side


def test_noise_seldom_moves_the_precision() -> None:
    moved = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)

        def try_at(precision: float, before: PriorTrial | None, generator: torch.Generator = generator) -> PriorTrial:
            return PriorTrial(precision, 1 + torch.randn(400, generator=generator, dtype=torch.float64), 1.0, 1e9)

        moved += search_prior(try_at, 1.0).best.precision != 1.0
    # Each of two neighbours passes one standard error one time in six.
    assert moved / 200 == pytest.approx(1 - (1 - 0.1587) ** 2, abs=0.1)


def test_trials_end_once_they_have_cost_as_much_as_the_run() -> None:
    found = search_prior(trials_of(lambda log: 20 + 5 * log, limit=3.0), 1.0)
    assert (len(found.trials), found.is_cut) == (3, True)
    assert found.best.precision == found.trials[-1].precision


def test_a_precision_without_a_fit_is_passed_over() -> None:
    plain = trials_of(lambda log: 20 + 5 * log)

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        if precision < 0.2:
            raise NumericError("no mode")
        return plain(precision, before)

    assert search_prior(try_at, 1.0).best.precision == pytest.approx(math.exp(-STEP))


@pytest.fixture(scope="module")
def problem() -> tuple[LastLayerTarget, Tensor]:
    """A small head, and labels that its features leave uncertain."""
    arrays = {name: torch.from_numpy(np.asarray(part)) for name, part in make_arrays().items()}
    layout = HeadLayout(*arrays["head_weight"].shape)
    features, labels = arrays["features_train"][:60], arrays["labels_train"][:60]
    target = LastLayerTarget(features.float(), labels, layout, Prior(1.0))
    return target, torch.zeros(layout.num_params, dtype=torch.float64)


def test_chains_that_go_on_from_another_prior_are_of_their_own(problem: tuple[LastLayerTarget, Tensor]) -> None:
    target, start = problem
    runs = []
    for precision in (30.0, 1.0):
        own = target.with_prior(Prior(precision))
        gaussian = fit_gaussian(own, start=start).gaussian
        common = {"mode": gaussian.mean, "covariance": gaussian.covariance, "num_chains": 64, "dispersion": 1.0}
        short = sample_hmc(
            own,
            generator=torch.Generator().manual_seed(1),
            num_warmup=12,
            num_draws=16,
            go_on=runs[-1] if runs else None,
            **common,
        )
        runs.append(short)
        long = sample_hmc(own, generator=torch.Generator().manual_seed(2), num_warmup=100, num_draws=200, **common)
        for moment in (1, 2):  # of |theta|^2, where a chain that had not left the other prior would be far away
            ours, theirs = (run.draws.double().square().sum(dim=2).pow(moment).mean(dim=1) for run in (short, long))
            error = math.hypot(*(float(part.std()) / len(part) ** 0.5 for part in (ours, theirs)))
            assert abs(float(ours.mean() - theirs.mean())) < 4 * error


def test_chains_that_go_on_start_where_the_others_are(problem: tuple[LastLayerTarget, Tensor]) -> None:
    target, start = problem
    gaussian = fit_gaussian(target, start=start).gaussian

    def draws(dispersion: float, go_on: HmcRun | None) -> HmcRun:
        return sample_hmc(
            target,
            mode=gaussian.mean,
            covariance=gaussian.covariance,
            generator=torch.Generator().manual_seed(1),
            num_chains=4,
            num_warmup=2,
            num_draws=2,
            dispersion=dispersion,
            go_on=go_on,
        )

    first = draws(1.0, None)
    assert not torch.equal(first.draws, draws(5.0, None).draws)
    assert torch.equal(draws(1.0, first).draws, draws(5.0, first).draws)


def test_a_flow_that_goes_on_begins_as_the_other_ended(problem: tuple[LastLayerTarget, Tensor]) -> None:
    target, start = problem
    base = fit_gaussian(target, start=start, structure="diag").gaussian
    first = fit_flow(target, base, flow="affine", epochs=40, generator=torch.Generator().manual_seed(1))
    again = fit_flow(
        target,
        base,
        flow="affine",
        epochs=1,
        learning_rate=1e-12,
        generator=torch.Generator().manual_seed(2),
        go_on=first.posterior,
    )
    noise = torch.randn(5, target.layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, theirs = (fit.posterior.from_noise(noise)[0] for fit in (first, again))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    unmoved = base.mean + base.covariance.unwhiten(noise)
    assert float((ours - unmoved).abs().max()) > 0.05
