"""The search for the prior precision against direct minimisation."""

import functools
import math
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.arrays import make_arrays
from problems.heads import by_noisy_sign, draw_examples, gaussian_at_mode, head_target
from problems.oracles import negative_log_likelihood
from problems.seeds import antithetic

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.memory import NUM_DRAWS
from bnncli.inference.prior_search import TOLERANCES, PriorSearch, search
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget

LAYOUTS = [HeadLayout(3, 4), HeadLayout(1, 4, has_bias=False)]
make_target = partial(head_target, num_examples=40, labels=by_noisy_sign)
make_data = partial(draw_examples, labels=by_noisy_sign, seed=1)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))


def predictive_nll(features: torch.Tensor, labels: torch.Tensor, theta: torch.Tensor, layout: HeadLayout) -> float:
    return float(HeldOutFeatures(features, labels, layout).losses(theta).mean())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@every_layout
def test_predictive_nll_is_the_average_over_draws_and_examples(layout: HeadLayout) -> None:
    features, labels = make_data(layout, 40)
    theta = torch.randn(6, layout.num_params, generator=seeded(), dtype=torch.float64)
    total = 0.0
    for x, label in zip(features, labels, strict=True):
        logits = layout.logits(x[None], theta)[:, 0]
        if layout.num_outputs == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        total -= math.log(logits.softmax(dim=1).mean(dim=0)[label])
    assert predictive_nll(features, labels, theta, layout) == pytest.approx(total / 40, rel=1e-12)


@every_structure
@every_layout
def test_marglik_search_finds_the_maximum_of_the_evidence(structure: str, layout: HeadLayout) -> None:
    target, start = make_target(layout), torch.zeros(layout.num_params)

    def loss(log_precision: float) -> float:
        at = target.with_prior(Prior(math.exp(log_precision)))
        return -fit_gaussian(at, start=start, structure=structure).log_marginal_likelihood

    expected = scipy.optimize.minimize_scalar(loss, bounds=(-4, 11), method="bounded").x
    found = search(target, start=start, generator=seeded(), structure=structure, criterion="marglik")
    assert math.log(found.best) == pytest.approx(expected, abs=0.07)
    assert not found.at_edge


@every_layout
def test_val_search_finds_the_lowest_validation_nll(layout: HeadLayout) -> None:
    target, start = make_target(layout), torch.zeros(layout.num_params)
    features, labels = make_data(layout, 400)
    found = search(target, start=start, generator=seeded(), held_out=target.held_out(features, labels))
    noise = antithetic(128, layout.num_params, 7)

    def loss(log_precision: float) -> float:
        fit = fit_gaussian(target.with_prior(Prior(math.exp(log_precision))), start=start)
        return predictive_nll(features, labels, fit.gaussian.from_noise(noise)[0], layout)

    best_place = min(range(0, 100, 5), key=lambda i: loss(-3 + 0.1 * i))
    best_on_grid = min(loss(-3 + 0.1 * i) for i in range(best_place - 4, best_place + 5))
    assert loss(math.log(found.best)) < best_on_grid + 1e-4
    assert dict(found.curve)[found.best] == pytest.approx(loss(math.log(found.best)), abs=1e-5)


@functools.cache
def mode_and_hessian(layout: HeadLayout, precision: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From scratch: scipy's minimum, and there a dense Hessian by autograd."""
    target = make_target(layout).with_prior(Prior(precision))

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = target.log_joint_and_grad(torch.from_numpy(theta)[None])
        return -value.item(), -gradient[0].numpy()

    rough = scipy.optimize.minimize(loss, np.zeros(layout.num_params), jac=True, method="BFGS", options={"gtol": 1e-6})
    mode = torch.from_numpy(rough.x)
    for _ in range(4):
        hessian = torch.autograd.functional.hessian(lambda t: penalised(target, t), mode)
        mode = mode - torch.linalg.solve(hessian, -target.log_joint_and_grad(mode[None])[1][0])
    return mode, hessian


def brute_force(criterion: str, layout: HeadLayout, precision: float) -> float:
    """The criterion from scratch, by the Hessian's inverse and slogdet."""
    target, size = make_target(layout).with_prior(Prior(precision)), layout.num_params
    mode, hessian = mode_and_hessian(layout, precision)
    if criterion == "marglik":
        log_det = torch.linalg.slogdet(hessian)[1].item()
        return -target.log_joint(mode[None]).item() - 0.5 * size * math.log(2 * math.pi) + 0.5 * log_det
    # L lower triangular with L L^T = H^{-1}, as the covariance has it: the same draws from the same noise.
    noise = antithetic(NUM_DRAWS, size, 7)
    draws = mode + noise @ torch.linalg.cholesky(torch.linalg.inv(hessian)).T
    return predictive_nll(*make_data(layout, 400), draws, layout)


def penalised(target: LastLayerTarget, theta: torch.Tensor) -> torch.Tensor:
    return negative_log_likelihood(target, theta) + 0.5 * target.prior.weight_precision * theta.square().sum()


def search_both(criterion: str, layout: HeadLayout, **keywords: float) -> PriorSearch:
    features, labels = make_data(layout, 400)
    target, start = make_target(layout), torch.zeros(layout.num_params)
    val = {"held_out": target.held_out(features, labels)} if criterion == "val" else {}
    return search(target, start=start, generator=seeded(), criterion=criterion, **val, **keywords)


@every_layout
@pytest.mark.parametrize("criterion", ["val", "marglik"])
def test_without_interpolation_the_whole_curve_is_that_of_fits_from_scratch(criterion: str, layout: HeadLayout) -> None:
    found = search_both(criterion, layout, tolerance=0.0)
    assert len(found.curve) >= 11  # 15, or less where the best is at an edge
    for precision, value in found.curve:
        exact = brute_force(criterion, layout, precision)
        assert value == pytest.approx(exact, rel=1e-6), precision


@every_layout
@pytest.mark.parametrize("criterion", ["val", "marglik"])
def test_interpolation_keeps_to_its_tolerance_and_the_choice(criterion: str, layout: HeadLayout) -> None:
    found, exact = search_both(criterion, layout), search_both(criterion, layout, tolerance=0.0)
    assert math.log(found.best) == pytest.approx(math.log(exact.best), abs=0.05)
    for precision, value in found.curve:
        expected = brute_force(criterion, layout, precision)
        assert value == pytest.approx(expected, abs=2 * TOLERANCES[criterion]), precision


@every_structure
def test_at_the_checkpoint_the_curve_is_that_of_fits_from_scratch(structure: str) -> None:
    target, start = make_target(LAYOUTS[0]), torch.ones(15, dtype=torch.float64)
    features, labels = make_data(LAYOUTS[0], 400)
    common = {"start": start, "structure": structure, "center": "checkpoint"}
    found = search(target, generator=seeded(), held_out=target.held_out(features, labels), **common)
    noise = antithetic(NUM_DRAWS, 15, 7)
    for precision, value in found.curve:
        fit = fit_gaussian(target.with_prior(Prior(precision)), **common)
        assert value == pytest.approx(
            predictive_nll(features, labels, fit.gaussian.from_noise(noise)[0], LAYOUTS[0]), rel=1e-12
        )


@every_structure
def test_the_marginal_likelihood_is_the_targets_own_wherever_the_gaussian_is_centred(structure: str) -> None:
    target, start = make_target(LAYOUTS[0]), torch.full((15,), 2.0, dtype=torch.float64)
    common = {"start": start, "structure": structure, "criterion": "marglik"}
    beside = search(target, generator=seeded(), center="checkpoint", **common)
    mode = search(target, generator=seeded(), **common)
    assert (beside.best, beside.curve) == (mode.best, mode.curve)
    assert torch.equal(beside.fit.gaussian.mean, start)
    assert beside.fit.gaussian.prior.weight_precision == mode.best


@every_structure
def test_the_fit_of_the_search_is_that_of_the_best_precision_alone(structure: str) -> None:
    target, start = make_target(LAYOUTS[0]), torch.zeros(15)
    found = search(target, start=start, generator=seeded(), criterion="marglik", structure=structure)
    alone = fit_gaussian(target.with_prior(Prior(found.best)), start=start, structure=structure)
    assert found.fit.gaussian.prior.weight_precision == found.best
    assert found.fit.log_marginal_likelihood == pytest.approx(alone.log_marginal_likelihood, abs=1e-3)
    assert found.fit.mode.newton_decrement < 1e-3
    assert dict(found.curve)[found.best] == pytest.approx(-found.fit.log_marginal_likelihood)
    torch.testing.assert_close(found.fit.gaussian.mean, alone.gaussian.mean, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("bounds", "best"), [((1e3, 1e5), 1e3), ((1e-5, 1e-3), 1e-3), ((2.0, 2.0), 2.0)])
def test_a_best_at_the_end_of_the_grid_is_told(bounds: tuple[float, float], best: float) -> None:
    found = search(
        make_target(LAYOUTS[0]), start=torch.zeros(15), generator=seeded(), criterion="marglik", bounds=bounds
    )
    assert found.at_edge
    assert found.best == pytest.approx(best)


def test_val_without_validation_data_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a labelled val split"):
        search(make_target(LAYOUTS[0]), start=torch.zeros(15), generator=seeded())


@pytest.mark.long
@pytest.mark.parametrize(("seed", "num_train", "is_searched"), [(3, 1000, True), (5, 4000, False)])
def test_a_prior_for_the_mode_alone_is_searched_for_where_it_may_gain(
    seed: int, num_train: int, is_searched: bool
) -> None:
    arrays = {name: torch.from_numpy(part) for name, part in make_arrays(seed, 5, 10, num_train).items()}
    layout = HeadLayout(5, 10)
    target = LastLayerTarget(arrays["features_train"], arrays["labels_train"], layout, Prior(1.0))
    held_out = target.held_out(arrays["features_val"], arrays["labels_val"])
    found = search(target, start=torch.zeros(55, dtype=torch.float64), generator=seeded(), held_out=held_out)
    assert (found.plug_in is not None) == is_searched
    lowest = min(nll for _, nll in found.curve)
    precisions = 10 ** torch.linspace(-2, 3, 41)
    modes = [gaussian_at_mode(target.with_prior(Prior(float(one)))).mean for one in precisions]
    of_modes = min(float(held_out.losses(mode.unsqueeze(0)).mean()) for mode in modes)
    assert (of_modes < 0.99 * lowest) == is_searched
