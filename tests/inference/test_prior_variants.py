"""Variants of the prior: the climb to a precision, folds, and one precision a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.arrays import make_arrays
from problems.heads import by_noisy_sign, gaussian_at_mode, head_target
from problems.seeds import normal, seeded
from problems.tiny_networks import losses_of, tiny_target
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bnncli.errors import NumericError
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD
from bnncli.inference.elbo import log_weight_spread
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import fit_gaussian, num_effective
from bnncli.inference.prior_variants import (
    STEP,
    Fold,
    PriorTrial,
    choose_layer_precisions,
    losses_if_close,
    safe_update,
    search_folds,
    search_prior,
    stratified_folds,
)
from bnncli.inference.refine import fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets.curvature_choice import CurvatureChoice
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
            own, generator=torch.Generator().manual_seed(1), num_warmup=12, num_draws=16,
            go_on=runs[-1] if runs else None, **common,
        )  # fmt: skip
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
            target, mode=gaussian.mean, covariance=gaussian.covariance, generator=torch.Generator().manual_seed(1),
            num_chains=4, num_warmup=2, num_draws=2, dispersion=dispersion, go_on=go_on,
        )  # fmt: skip

    first = draws(1.0, None)
    assert not torch.equal(first.draws, draws(5.0, None).draws)
    assert torch.equal(draws(1.0, first).draws, draws(5.0, first).draws)


def test_a_flow_that_goes_on_begins_as_the_other_ended(problem: tuple[LastLayerTarget, Tensor]) -> None:
    target, start = problem
    base = fit_gaussian(target, start=start, structure="diag").gaussian
    first = fit_flow(target, base, flow="affine", epochs=40, generator=torch.Generator().manual_seed(1))
    again = fit_flow(
        target, base, flow="affine", epochs=1, learning_rate=1e-12, generator=torch.Generator().manual_seed(2),
        go_on=first.posterior,
    )  # fmt: skip
    noise = torch.randn(5, target.layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, theirs = (fit.posterior.from_noise(noise)[0] for fit in (first, again))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    unmoved = base.mean + base.covariance.unwhiten(noise)
    assert float((ours - unmoved).abs().max()) > 0.05


def test_folds_have_even_sizes_and_even_shares_of_every_class() -> None:
    labels = torch.tensor([0] * 33 + [1] * 12 + [2] * 3)[torch.randperm(48, generator=seeded(1))]
    folds = stratified_folds(labels, 5, seeded(2))
    counts = torch.stack([torch.bincount(labels[folds == place], minlength=3) for place in range(5)])
    assert counts.sum(dim=0).tolist() == [33, 12, 3]
    assert (counts.max(dim=0).values - counts.min(dim=0).values).max() <= 1
    sizes = counts.sum(dim=1)
    assert sizes.max() - sizes.min() <= 1
    assert torch.equal(folds, stratified_folds(labels, 5, seeded(2)))
    assert not torch.equal(folds, stratified_folds(labels, 5, seeded(3)))


def test_folds_keep_groups_whole_and_have_nearly_even_sizes() -> None:
    sizes = np.random.default_rng(0).integers(1, 9, size=40)
    groups = RowGroups(np.random.default_rng(1).permutation(np.repeat(np.arange(40), sizes)))
    labels = torch.zeros(len(groups.index), dtype=torch.int64)
    folds = stratified_folds(labels, 5, seeded(2), groups=groups)
    assert all(len({*folds[torch.from_numpy(groups.index == group)].tolist()}) == 1 for group in range(40))
    counts = torch.bincount(folds, minlength=5)
    assert counts.max() - counts.min() <= 1  # groups of one row come last and even them out
    assert torch.equal(folds, stratified_folds(labels, 5, seeded(2), groups=groups))
    assert not torch.equal(folds, stratified_folds(labels, 5, seeded(3), groups=groups))


def test_folds_of_several_labels_have_even_sizes() -> None:
    folds = stratified_folds(torch.ones(23, 4, dtype=torch.uint8), 5, seeded())
    assert torch.bincount(folds).tolist() == [5, 5, 5, 4, 4]


def left_out_losses(
    fitted: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor], precision: float, mean: Tensor
) -> Tensor:
    """Losses of rows under the Laplace approximation to others: scipy's mode, autograd's Hessian, quadrature over the logit."""
    features, labels = fitted

    def loss(theta: Tensor) -> Tensor:
        nll = binary_cross_entropy_with_logits(features @ theta, labels.double(), reduction="sum")
        return nll + 0.5 * precision * (theta - mean).square().sum()

    def value_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(values, requires_grad=True)
        value = loss(theta)
        return value.item(), torch.autograd.grad(value, theta)[0].numpy()

    options = {"ftol": 0, "gtol": 1e-9}
    start = np.zeros(features.shape[1])
    mode = torch.from_numpy(
        scipy.optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x
    )
    covariance = torch.linalg.inv(torch.autograd.functional.hessian(loss, mode))
    x, y = judged
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(60))
    sd = ((x @ covariance) * x).sum(dim=1).sqrt()
    logits = (x @ mode)[:, None] + sd[:, None] * nodes
    signs = (2 * y - 1.0)[:, None]
    return -((signs * logits).sigmoid() @ (weights / weights.sum())).log()


@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_the_curve_is_the_nll_of_rows_that_their_fold_has_not_seen(scale: float) -> None:
    layout = HeadLayout(1, 4, has_bias=False)
    whole = head_target(layout, 40, labels=by_noisy_sign)
    folds = (torch.arange(40) // 4).clamp(max=4)  # of 4 rows, and one of 24
    means = [scale * (1 + place / 10) * normal(4, seed=3) for place in range(5)]  # each fold has its own

    def fold(place: int) -> Fold:
        rows = (folds == place).nonzero()[:, 0]
        prior = Prior(1.0) if scale == 0 else Prior(1.0).with_mean(means[place], scale)
        held_out = whole.held_out(whole.features[rows], whole.labels[rows])
        return Fold(whole.some((folds != place).nonzero()[:, 0]).with_prior(prior), held_out, len(rows))

    found = search_folds(
        [fold(place) for place in range(5)], start=torch.zeros(4), generator=seeded(4), structure="full"
    )
    for precision, value in found.curve:
        if precision < 0.5:
            continue  # draws of 256 err by more there
        losses = []
        for place in range(5):
            inside, outside = folds != place, folds == place
            losses.append(
                left_out_losses(
                    (whole.features[inside], whole.labels[inside]),
                    (whole.features[outside], whole.labels[outside]),
                    precision,
                    means[place],
                )
            )
        assert value == pytest.approx(float(torch.cat(losses).mean()), abs=0.01), precision
    assert found.best == min(found.curve, key=lambda point: point[1])[0]
    assert [fit.gaussian.require_prior().weight_precision for fit in found.fits] == pytest.approx([found.best] * 5)
    assert math.isfinite(found.best)


LAYERS = {"0": slice(0, 25), "2": slice(25, 43)}


@cache
def curvature_of(structure: str, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """H as a dense matrix, and the loss of all examples, at the network's parameters times a scale."""
    target = tiny_target(examples=120, prior=Prior(1.0))
    theta = scale * target.layout.trained()
    hessian = ggn(target, theta, structure)[f"hessian.{structure}"]
    return hessian.diag() if structure == "diag" else hessian, losses_of(target, theta).sum()


def brute_evidence(target: Any, structure: str, logs: Tensor, scale: float = 1.0) -> float:
    """Of one log precision for each layer, in full."""
    theta = scale * target.layout.trained()
    dense, loss = curvature_of(structure, scale)
    precisions = torch.cat([logs[i].exp().repeat(place.stop - place.start) for i, place in enumerate(LAYERS.values())])
    log_prior = torch.distributions.Normal(0.0, precisions.rsqrt()).log_prob(theta).sum()
    joint = log_prior - loss
    return float(joint + 0.5 * len(theta) * math.log(2 * math.pi) - 0.5 * torch.logdet(dense + precisions.diag()))


@pytest.mark.parametrize("has_variances", [True, False])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_precisions_are_those_of_the_largest_evidence(
    structure: str, has_variances: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(examples=120, prior=Prior(1.0))
    start = fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint")
    if not has_variances:
        monkeypatch.delattr(type(start.gaussian.covariance), "marginal_variances", raising=False)
    chosen = choose_layer_precisions(target, start, structure)
    found = torch.tensor([math.log(one) for one in chosen.precisions.values()], dtype=torch.float64)
    best = minimize(
        lambda x: -brute_evidence(target, structure, torch.as_tensor(x)), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-9},
    )  # fmt: skip
    assert list(chosen.precisions) == list(LAYERS)
    torch.testing.assert_close(found, torch.as_tensor(best.x), rtol=0, atol=5e-3)
    gain = brute_evidence(target, structure, found) - brute_evidence(
        target, structure, torch.zeros(2, dtype=torch.float64)
    )
    assert chosen.gain == pytest.approx(gain, abs=1e-8)
    diagonal = chosen.fit.gaussian.require_prior().diagonal(target.layout)
    for index, place in enumerate(LAYERS.values()):
        torch.testing.assert_close(diagonal[place].log(), found[index].expand(place.stop - place.start))


@pytest.mark.parametrize("scale", [0.03, 0.3])
def test_so_are_those_of_layers_that_the_data_say_little_of(scale: float) -> None:
    """Where MacKay's update alone goes back and forth."""
    target = tiny_target(examples=120, prior=Prior(1.0))
    start = fit_gaussian(target, start=scale * target.layout.trained(), structure="full", center="checkpoint")
    found = torch.tensor(list(choose_layer_precisions(target, start, "full").precisions.values()), dtype=torch.float64)
    best = minimize(
        lambda x: -brute_evidence(target, "full", torch.as_tensor(x), scale), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-9},
    )  # fmt: skip
    torch.testing.assert_close(found.log(), torch.as_tensor(best.x), rtol=0, atol=5e-3)


def test_the_evidence_never_falls() -> None:
    """From far away, where the quick update overshoots."""
    target = tiny_target(examples=120)
    for precision in (1e-3, 0.1, 10.0, 1e4):
        under = target.with_prior(Prior(precision))
        start = fit_gaussian(under, start=target.layout.trained(), structure="full", center="checkpoint")
        assert choose_layer_precisions(under, start, "full").gain >= 0


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_safe_update_raises_the_evidence_from_anywhere(scale: float) -> None:
    target = tiny_target(examples=120)
    theta = scale * target.layout.trained()
    hessian = ggn(target, theta, "full")["hessian.full"]
    sizes = torch.tensor([25.0, 18.0], dtype=torch.float64)

    def of_layers(values: Tensor) -> Tensor:
        return torch.stack([values[place].sum() for place in LAYERS.values()])

    def evidence(logs: Tensor) -> Tensor:
        precisions = logs.exp().repeat_interleave(sizes.long())
        fits = (precisions.log() - precisions * theta.square()).sum()
        return 0.5 * (fits - torch.logdet(hessian + precisions.diag()))

    for start in ([-7.0, -7.0], [2.3, 2.3], [9.0, 9.0], [-4.0, 6.0]):
        logs = torch.tensor(start, dtype=torch.float64)
        covariance = torch.linalg.inv(hessian + logs.exp().repeat_interleave(sizes.long()).diag())
        new = safe_update(sizes, of_layers(theta.square()), of_layers(covariance.diagonal()))
        assert evidence(new) > evidence(logs)


PRIORS = {"one": Prior(2.0), "bias": Prior(2.0, 0.5)}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", ["full", "block", "diag", "kron", "ekfac", "low-rank"])
def test_it_is_the_trace_that_the_prior_leaves(structure: str, prior: str) -> None:
    target = tiny_target(examples=120, prior=PRIORS[prior], choice=CurvatureChoice(rank=10))
    fit = fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint")
    root = fit.gaussian.covariance.unwhiten(torch.eye(target.layout.num_params, dtype=torch.float64))
    shares = PRIORS[prior].diagonal(target.layout) * root.square().sum(dim=0)
    found = num_effective(target.with_prior(Prior(7.0)), fit)
    assert found == pytest.approx(target.layout.num_params - float(shares.sum()), abs=1e-4)
    assert 0 < found < target.layout.num_params


def test_it_is_that_of_the_curvature_under_a_precision_for_each_layer() -> None:
    target = tiny_target(examples=120)
    target = target.with_prior(Prior.of_parts((1.0, 2.0, 30.0, 4.0), target.layout))
    theta = target.layout.trained()
    dense = ggn(target, theta, "full")["hessian.full"]
    wanted = torch.linalg.solve(dense + target.prior.diagonal(target.layout).diag(), dense).trace()
    for structure in ("full", "block"):
        fit = fit_gaussian(target, start=theta, structure=structure, center="checkpoint")
        found = num_effective(target, fit)
        assert (found == pytest.approx(float(wanted), abs=1e-6)) == (structure == "full")


def test_of_a_subnetwork_it_counts_those_that_vary() -> None:
    target = tiny_target(examples=120, choice=CurvatureChoice(size=6))
    fit = fit_gaussian(target, start=target.layout.trained(), structure="subnetwork", center="checkpoint")
    places = fit.gaussian.covariance.varying
    dense = ggn(target, target.layout.trained(), "full")["hessian.full"][places][:, places]
    wanted = torch.linalg.solve(dense + target.prior.diagonal(target.layout)[places].diag(), dense).trace()
    assert num_effective(target, fit) == pytest.approx(float(wanted), abs=1e-8)


def test_a_prior_times_a_factor_multiplies_each_precision() -> None:
    layout = tiny_target().layout
    for prior in (*PRIORS.values(), Prior.of_parts((1.0, 2.0, 30.0, 4.0), layout)):
        torch.testing.assert_close(prior.times(3.0).diagonal(layout), 3 * prior.diagonal(layout))


@pytest.mark.parametrize(("num_train", "is_close"), [(4000, True), (60, False)])
def test_a_gaussian_stands_for_the_posterior_where_that_predicts_the_same(num_train: int, is_close: bool) -> None:
    arrays = make_arrays(3, 5, 10, num_train)
    features, labels = torch.from_numpy(arrays["features_train"]), torch.from_numpy(arrays["labels_train"])
    target = LastLayerTarget(features, labels, HeadLayout(5, 10), Prior(31.6))
    gaussian = gaussian_at_mode(target)
    assert log_weight_spread(target, gaussian, seeded()) < CLOSE_LOG_WEIGHT_SD  # in both cases
    held_out = target.held_out(torch.from_numpy(arrays["features_val"]), torch.from_numpy(arrays["labels_val"]))
    found = losses_if_close(target, gaussian, held_out, 2000, seeded())
    assert (found is not None) == is_close
    drawn = sample_hmc(
        target, mode=gaussian.mean, covariance=gaussian.covariance, generator=seeded(), num_warmup=20, num_draws=60
    )
    losses = held_out.losses(drawn.draws.flatten(0, 1)).mean()
    assert (abs(held_out.losses(gaussian.sample(2000, seeded())).mean() / losses - 1) < 0.01) == is_close


def test_a_gaussian_far_from_the_posterior_never_stands_for_it() -> None:
    """Even if no prediction depends on it."""
    arrays = make_arrays(3, 5, 10, 60)
    features, labels = torch.from_numpy(arrays["features_train"]), torch.from_numpy(arrays["labels_train"])
    target = LastLayerTarget(features, labels, HeadLayout(5, 10, has_bias=False), Prior(0.01))
    gaussian = gaussian_at_mode(target)
    assert log_weight_spread(target, gaussian, seeded()) > 2 * CLOSE_LOG_WEIGHT_SD
    held_out = target.held_out(torch.zeros_like(features), labels)
    assert losses_if_close(target, gaussian, held_out, 100, seeded()) is None
