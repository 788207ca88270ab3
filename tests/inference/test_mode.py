"""Modes of last layers and of targets that are not concave."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.heads import LAYOUTS, by_noisy_sign, every_layout, head_target
from problems.oracles import in_theta_order
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import NumericError
from bnncli.inference import mode as mode_module
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import Mode, climb_to_mode, covariance_at, find_mode, solve_within
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets import last_layer
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

make_target = partial(head_target, num_examples=60, labels=by_noisy_sign, prior=0.3)


def far_start(layout: HeadLayout) -> torch.Tensor:
    return 5 * torch.randn(layout.num_params, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mode_by_scipy(target: LastLayerTarget) -> np.ndarray:
    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = target.log_joint_and_grad(torch.tensor(theta)[None])
        return -value.item(), -gradient[0].numpy()

    start = np.zeros(target.layout.num_params)
    return scipy.optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-9}).x


@every_layout
def test_mode_is_the_one_scipy_finds(layout: HeadLayout) -> None:
    target = make_target(layout)
    found = find_mode(target, far_start(layout), tolerance=1e-8)
    np.testing.assert_allclose(found.theta.numpy(), mode_by_scipy(target), atol=1e-6)
    assert found.log_joint == pytest.approx(target.log_joint(found.theta[None]).item(), rel=1e-12)


@every_layout
def test_decrement_is_the_distance_in_posterior_standard_deviations(layout: HeadLayout) -> None:
    target = make_target(layout)
    found = find_mode(target, far_start(layout), tolerance=0.5)
    precision = ggn(target, found.theta, "full")["hessian.full"] + 0.3 * torch.eye(layout.num_params)
    gap = found.theta - torch.tensor(mode_by_scipy(target))
    assert found.newton_decrement < 0.5
    assert found.newton_decrement == pytest.approx(float(gap @ precision @ gap) ** 0.5, rel=0.15, abs=1e-4)


@every_layout
def test_a_kronecker_whitening_leads_to_the_same_mode(layout: HeadLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(layout)
    full = find_mode(target, far_start(layout), tolerance=1e-8)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 0)
    kron = find_mode(target, far_start(layout), tolerance=1e-8)
    assert set(kron.hessian) == {"hessian.kron.A", "hessian.kron.B"}
    torch.testing.assert_close(kron.theta, full.theta, rtol=0, atol=1e-7)


@every_layout
@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 1e-5])
def test_a_polished_mode_keeps_to_the_tolerance(layout: HeadLayout, tolerance: float) -> None:
    target = make_target(layout)
    found = find_mode(target, far_start(layout), tolerance=tolerance, polish=True)
    precision = ggn(target, found.theta, "full")["hessian.full"] + 0.3 * torch.eye(layout.num_params)
    gap = found.theta - torch.tensor(mode_by_scipy(target))
    assert float(gap @ precision @ gap) ** 0.5 < 1.2 * tolerance + 1e-6
    # The quadratic model predicts what the last step gains to about 15 %.
    assert found.log_joint == pytest.approx(target.log_joint(found.theta[None]).item(), abs=0.04 * tolerance)


def test_starting_at_the_mode_takes_no_step() -> None:
    target = make_target(LAYOUTS[0])
    found = find_mode(target, far_start(LAYOUTS[0]), tolerance=1e-6)
    again = find_mode(target, found.theta, tolerance=1e-3)
    assert again.num_iterations == 0
    assert torch.equal(again.theta, found.theta)


def test_separable_classes_under_a_weak_prior_have_a_mode() -> None:
    features = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]], dtype=torch.float64)
    target = LastLayerTarget(features, torch.tensor([0, 0, 1, 1]), HeadLayout(1, 1), Prior(1e-6))
    found = find_mode(target, torch.tensor([-40.0, 10.0]))
    assert found.theta[0] > 5
    assert found.newton_decrement < 1e-3


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_hessian_of_any_structure_warms_the_search(structure: str) -> None:
    target = make_target(LAYOUTS[0])
    found = find_mode(target, far_start(LAYOUTS[0]), hessian=ggn(target, torch.zeros(15), structure), tolerance=1e-8)
    torch.testing.assert_close(found.theta, find_mode(target, torch.zeros(15), tolerance=1e-8).theta, atol=1e-7, rtol=0)


def test_too_few_iterations_are_an_error() -> None:
    with pytest.raises(NumericError, match="no mode after 1 Newton steps"):
        find_mode(make_target(LAYOUTS[0]), far_start(LAYOUTS[0]), max_iterations=1)


def make_wide(prior_precision: float, num_examples: int = 2000) -> LastLayerTarget:
    """Twenty overlapping classes in rectified features with a decaying spectrum, as networks give them; P = 1,300."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(20, (num_examples,), generator=generator)
    scales = torch.logspace(0.3, -1.2, 64)
    centers = 2 * scales * torch.randn(20, 64, generator=generator)
    basis = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
    noise = scales * torch.randn(num_examples, 64, generator=generator)
    features = torch.relu((centers[labels] + noise) @ basis.T + 0.2)
    return LastLayerTarget(features, labels, HeadLayout(20, 64), Prior(prior_precision))


def mode_by_dense_newton(target: LastLayerTarget) -> torch.Tensor:
    """Damped Newton with the whole Hessian of autograd's textbook loss, in float64."""
    layout, features = target.layout, target.features.double()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(features, *layout.split(theta))
        likelihood = torch.nn.functional.cross_entropy(logits, target.labels, reduction="sum")
        return likelihood + 0.5 * target.prior.weight_precision * theta.square().sum()

    theta = torch.zeros(layout.num_params, dtype=torch.float64)
    for _ in range(60):
        leaf = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), leaf)
        probs = torch.softmax(torch.nn.functional.linear(features, *layout.split(theta)), dim=1)
        weights = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
        blocks = torch.einsum("nkl,ni,nj->kilj", weights, *[layout.augment_features(features)] * 2)
        precision = in_theta_order(blocks.reshape(layout.num_params, -1), layout)
        precision.diagonal().add_(target.prior.weight_precision)
        step = torch.linalg.solve(precision, gradient)
        length = 1.0
        while loss(theta - length * step) > loss(theta) - 1e-4 * length * gradient @ step + 1e-9:
            length /= 2
        theta = theta - length * step
        if gradient @ step < 1e-18:
            break
    return theta


@pytest.mark.parametrize("prior_precision", [0.1, 100.0])
@pytest.mark.parametrize("most_full", [0, 5000])
def test_mode_is_the_one_of_dense_newton_steps(
    prior_precision: float, most_full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", most_full)
    wide = make_wide(prior_precision, num_examples=400)
    layout = HeadLayout(5, 12)
    target = LastLayerTarget(wide.features[:, :12], wide.labels % 5, layout, Prior(prior_precision))
    found = find_mode(target, torch.zeros(layout.num_params))
    gap = found.theta - mode_by_dense_newton(target)
    precision = target.hessian_vector_product(found.theta, torch.eye(layout.num_params))
    distance = float(gap @ precision @ gap) ** 0.5
    assert distance < 1.2e-3
    assert distance == pytest.approx(found.newton_decrement, abs=2e-4)


def test_mode_is_the_one_that_lbfgs_finds() -> None:
    target = make_wide(10.0, num_examples=300)
    theta = torch.zeros(target.layout.num_params, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=2000, tolerance_grad=1e-7, line_search_fn="strong_wolfe")
    exact = LastLayerTarget(target.features.double(), target.labels, target.layout, Prior(10.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -exact.log_joint(theta.unsqueeze(0)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = find_mode(exact, torch.zeros(target.layout.num_params), tolerance=1e-6)
    torch.testing.assert_close(found.theta, theta.detach(), rtol=0, atol=1e-5)


def exact_decrement(target: LastLayerTarget, theta: torch.Tensor, labels: torch.Tensor) -> float:
    """sqrt(g^T H^{-1} g) at theta (P,), H and g made as dense matrices in float64."""
    layout, precision = target.layout, float(target.prior.weight_precision)
    rows = layout.augment_features(target.features.double())
    places = layout.augment(torch.arange(layout.num_params))
    probabilities = (rows @ theta[places].T).softmax(dim=1)
    outer = torch.diag_embed(probabilities) - probabilities.unsqueeze(2) * probabilities.unsqueeze(1)
    size, flat = layout.num_params, places.flatten()
    hessian = torch.eye(size, dtype=torch.float64) * precision
    hessian[flat.unsqueeze(1), flat] += torch.einsum("nkl,ni,nj->kilj", outer, rows, rows).reshape(size, size)
    gradient = -precision * theta
    gradient[flat] += ((torch.nn.functional.one_hot(labels, layout.num_outputs) - probabilities).T @ rows).flatten()
    return float(
        torch.linalg.solve_triangular(torch.linalg.cholesky(hessian), gradient.unsqueeze(1), upper=False).norm()
    )


@pytest.mark.parametrize(
    ("num_examples", "num_features", "scale", "precision"),
    [(60, 4, 1e3, 1e-4), (60, 4, 1e4, 1e-2), (1000, 20, 100, 1e-4), (1000, 20, 1e4, 1)],
)
def test_large_features_under_a_weak_prior_end_where_they_are_said_to(
    num_examples: int, num_features: int, scale: float, precision: float
) -> None:
    """Conjugate gradients lose the curvature in float32 there, and their step pointed downhill: no distance at all."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_examples, num_features, generator=generator) * scale
    features = features.relu() if num_examples > 60 else features
    labels = torch.randint(0, 3, (num_examples,), generator=generator)
    layout = HeadLayout(3, num_features, True)
    target = LastLayerTarget(features, labels, layout, Prior(precision))
    mode = find_mode(target, 0.01 / scale * torch.randn(layout.num_params, generator=generator))
    assert exact_decrement(target, mode.theta, labels) < 2e-3


def distance_in_sd(target: LastLayerTarget, found: Mode, exact: Mode) -> float:
    """How far a mode is from another, in posterior standard deviations of all parameters together."""
    gap = (found.theta - exact.theta).unsqueeze(0)
    return math.sqrt(float((gap * target.hessian_vector_product(exact.theta, gap)).sum()))


def test_modes_of_many_parameters_are_found_by_rough_steps_to_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(6, 20)
    target = head_target(layout, 400, prior=0.1, dtype=torch.float64)
    start = 3 * torch.randn(layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact = find_mode(target, start, tolerance=1e-9)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "_FAR", 1.0)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 10)
    found = find_mode(target, start)
    distance = distance_in_sd(target, found, exact)
    assert distance < 0.1  # posterior standard deviations
    assert found.newton_decrement < 0.1
    assert found.log_joint == pytest.approx(exact.log_joint, abs=0.01)


@pytest.mark.parametrize("has_bias", [True, False])
def test_modes_of_many_parameters_are_found_to_the_tolerance_by_products_of_few_digits(
    monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    layout = HeadLayout(6, 20, has_bias=has_bias)
    target = head_target(layout, 400, prior=0.1, dtype=torch.float32)
    start = 3 * torch.randn(layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact = find_mode(target, start, tolerance=1e-6)
    rounded: list[int] = []

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        rounded.append(1)
        return last_layer._multiply_and_round(left, right)

    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: multiply)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 10)
    found = find_mode(target, start)
    distance = distance_in_sd(target, found, exact)
    assert distance < 0.1  # posterior standard deviations
    assert len(rounded) > 20


def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of more than fifty parameters are searched as the large ones are, with products of few digits."""
    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: last_layer._multiply_and_round)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 10)


@pytest.mark.parametrize("coarse_from", [0.0, 1e9])
def test_what_ends_a_search_was_looked_at_with_all_digits(monkeypatch: pytest.MonkeyPatch, coarse_from: float) -> None:
    as_large(monkeypatch)
    monkeypatch.setattr(mode_module, "_COARSE_FROM", coarse_from)
    looks: list[tuple[bool, bool]] = []
    newton_step = mode_module._newton_step

    def kept(target: LastLayerTarget, here: mode_module._Place, **more: object) -> mode_module._Step:
        step = newton_step(target, here, **more)
        looks.append((here.is_coarse, step.is_rough))
        return step

    monkeypatch.setattr(mode_module, "_newton_step", kept)
    target = head_target(HeadLayout(6, 20), 400, prior=0.1, dtype=torch.float32)
    start = 3 * torch.randn(target.layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    find_mode(target, start)
    assert looks[-2:] == [(coarse_from == 0, True), (False, False)]


def true_decrement(target: LastLayerTarget, found: Mode) -> float:
    _, gradient = target.log_joint_and_grad(found.theta.unsqueeze(0), dtype=torch.float64)
    return float(covariance_at(target, found.theta, "full").covariance.pull_back(gradient).norm())


@pytest.mark.parametrize(
    "prior", [Prior(0.1), Prior(1e-3), Prior(1.0, 1e-4), Prior(0.1, 1e-4), Prior(1e-3, 100.0), Prior(1e-4)]
)
@pytest.mark.parametrize("seed", range(3))
def test_few_digits_do_not_hide_how_far_the_mode_is(monkeypatch: pytest.MonkeyPatch, prior: Prior, seed: int) -> None:
    """A shift of all outputs has no curvature but the prior's, and rounding gives it some: weak priors of biases above all."""
    as_large(monkeypatch)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(800, 60, generator=generator).relu()
    labels = torch.randint(0, 6, (800,), generator=generator)
    target = LastLayerTarget(features, labels, HeadLayout(6, 60), prior)
    found = find_mode(target, torch.zeros(target.layout.num_params))
    assert found.newton_decrement < 0.1
    assert true_decrement(target, found) < 0.15  # what is told is from systems that are solved to a tenth


@pytest.mark.parametrize(
    "offset", [0.0, 1000.0, *(pytest.param(value, marks=pytest.mark.long) for value in (100.0, 10_000.0))]
)
def test_features_far_from_zero_end_few_digits_soon(monkeypatch: pytest.MonkeyPatch, offset: float) -> None:
    """Log likelihoods are small differences there, of terms that float32 rounds by more than a step gains, and bfloat16 by all of it."""
    as_large(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    features = offset + torch.randn(5000, 30, generator=generator)
    labels = torch.randint(0, 4, (5000,), generator=generator)
    target = LastLayerTarget(features, labels, HeadLayout(4, 30), Prior(1.0))
    found = find_mode(target, torch.zeros(target.layout.num_params))
    monkeypatch.setattr(mode_module, "_MANY", 10**9)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 2048)
    exact = find_mode(target, found.theta)
    assert found.num_iterations < 15
    assert found.log_joint == pytest.approx(
        exact.log_joint, abs=0.5
    )  # products with the Hessian are float32 all the same


Build = Callable[[], nn.Module]


def make(build: Build, num_inputs: int, num_examples: int = 40, precision: float = 0.5) -> NetworkTarget:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(build().eval())
    inputs = torch.randn(num_examples, num_inputs, generator=seeded(1), dtype=torch.float64)
    labels = (inputs @ torch.randn(num_inputs, 3, generator=seeded(2), dtype=torch.float64)).tanh().argmax(dim=1)
    labels[::7] = 1  # some that no network should learn
    layout = ModuleLayout.of(network, num_outputs=3, input_shape=(num_inputs,))
    return NetworkTarget(inputs, labels, layout, Prior(precision))


def tanh_network() -> NetworkTarget:
    return make(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 3, precision=2.0)


def relu_network() -> NetworkTarget:
    return make(lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)), 3)


def dense_hessian(target: NetworkTarget, theta: Tensor) -> Tensor:
    found: Tensor = torch.autograd.functional.hessian(lambda one: -log_joint(target, one), theta)
    return found


def log_joint(target: NetworkTarget, theta: Tensor) -> Tensor:
    """Written out: autograd passes through it twice."""
    logits = target.layout.logits(target.inputs, theta.unsqueeze(0))[0]
    log_likelihood = -nn.functional.cross_entropy(logits, target.labels, reduction="sum")
    return log_likelihood + target.prior.log_density(theta.unsqueeze(0), target.layout)[0]


def network_mode_by_scipy() -> tuple[np.ndarray, float]:
    """Of the tanh network."""
    target = tanh_network()

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(theta, requires_grad=True)
        value = -log_joint(target, leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    def hessian(theta: np.ndarray) -> np.ndarray:
        return dense_hessian(target, torch.tensor(theta)).numpy()

    start = target.layout.trained().numpy()
    found = scipy.optimize.minimize(loss, start, jac=True, hess=hessian, method="trust-exact", options={"gtol": 1e-9})
    return found.x, -found.fun


def test_the_mode_of_a_network_is_the_one_that_scipy_finds() -> None:
    target = tanh_network()
    theta, value = network_mode_by_scipy()
    found = climb_to_mode(target, target.layout.trained(), tolerance=1e-6)
    assert found.log_joint == pytest.approx(value, abs=1e-9)
    both = torch.stack([found.theta, torch.tensor(theta)])
    logits = target.logits(both, slice(None))  # the same mode, but for the signs and the order of units
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    gradient = target.log_joint_and_grad(found.theta[None])[1][0]
    exact = float(gradient @ torch.linalg.solve(dense_hessian(target, found.theta), gradient)) ** 0.5
    assert found.newton_decrement == pytest.approx(exact, rel=0.1, abs=1e-9)
    assert found.newton_decrement < 1e-6
    assert found.shortfall is None


def test_second_derivatives_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tanh_network()
    theta = target.layout.trained() + 0.5
    vectors = torch.randn(2, len(theta), generator=seeded(3), dtype=torch.float64)
    expected = vectors @ dense_hessian(target, theta)
    torch.testing.assert_close(target.second_derivatives(theta)(vectors), expected)
    monkeypatch.setattr("bnncli.targets.network._MOST_BYTES", {"cpu": 2_000})
    blocks = tanh_network()
    assert blocks.rows_at_once(2, torch.float64) < 20
    torch.testing.assert_close(blocks.second_derivatives(theta)(vectors), expected)


def test_a_linear_network_has_the_last_layers_mode() -> None:
    target = make(lambda: nn.Linear(4, 3), 4)
    found = climb_to_mode(target, target.layout.trained(), tolerance=1e-6)
    last = LastLayerTarget(target.inputs, target.labels, HeadLayout(3, 4), target.prior)
    expected = find_mode(last, torch.zeros(15), tolerance=1e-6)
    torch.testing.assert_close(found.theta, expected.theta, rtol=0, atol=1e-6)
    assert found.log_joint == pytest.approx(expected.log_joint, abs=1e-9)


def test_a_saddle_is_left() -> None:
    target = tanh_network()
    start = 1e-3 * target.layout.trained()
    assert float(torch.linalg.eigvalsh(dense_hessian(target, start))[0]) < -1
    found = climb_to_mode(target, start)
    assert float(torch.linalg.eigvalsh(dense_hessian(target, found.theta))[0]) > 0
    assert found.log_joint > float(target.log_joint(start[None])) + 5


def test_units_with_kinks_end_where_nothing_near_is_higher_or_say_how_far() -> None:
    target = relu_network()
    start = target.layout.trained()
    found = climb_to_mode(target, start)
    assert (found.newton_decrement < 1e-3) == (found.shortfall is None)
    assert found.newton_decrement < max(1.0, 0.05 * math.sqrt(len(start)))
    around = found.theta + 0.003 * torch.randn(100, len(start), generator=seeded(4), dtype=torch.float64)
    assert float(target.log_joint(around).max()) < found.log_joint + 1e-3


def test_a_search_that_may_not_go_on_says_how_far_it_came() -> None:
    target = tanh_network()
    with pytest.raises(
        NumericError, match=r"no mode after \d+ passes over the data: .* away.*; the limit of 9 passes was reached"
    ):
        climb_to_mode(target, target.layout.trained() * 0 + 0.1, most_passes=9)


def test_a_search_that_ends_near_gives_what_it_has_and_no_evidence_where_that_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tanh_network()
    start = target.layout.trained()
    monkeypatch.setattr(mode_module, "NEAR", math.inf)
    monkeypatch.setattr(mode_module, "MOST_PASSES", 12)
    fit = fit_gaussian(target, start=start)
    assert fit.mode.shortfall == "the limit of 12 passes was reached"
    gradient = target.log_joint_and_grad(fit.mode.theta[None])[1][0]
    precision = target.hessian_operator(fit.mode.theta)(torch.eye(len(start)))
    exact = float(gradient @ torch.linalg.solve(precision, gradient)) ** 0.5
    assert fit.mode.newton_decrement == pytest.approx(exact, rel=0.1)
    assert exact > 1
    assert fit.log_marginal_likelihood is None
    assert "nats higher" in str(fit.no_evidence)


@pytest.mark.parametrize(("radius", "is_inside"), [(100.0, True), (0.3, False)])
def test_steps_of_a_trust_region_are_those_of_the_quadratic_model(radius: float, is_inside: bool) -> None:
    root = torch.randn(8, 8, generator=seeded(5), dtype=torch.float64)
    matrix, gradient = root @ root.T + torch.eye(8), torch.randn(1, 8, generator=seeded(6), dtype=torch.float64)
    step = solve_within(lambda z: z @ matrix, gradient, radius=radius, accuracy=1e-10, most_products=50)
    assert step.is_inside == is_inside
    model = float((gradient * step.z).sum() - 0.5 * (step.z @ matrix * step.z).sum())
    assert step.promised == pytest.approx(model)
    assert step.length == pytest.approx(float(step.z.norm()))
    if is_inside:
        torch.testing.assert_close(step.z @ matrix, gradient)
        assert step.decrement == pytest.approx(math.sqrt(2 * model))
    else:
        assert step.length == pytest.approx(radius)


def test_steps_of_a_trust_region_go_along_negative_curvature_to_its_edge() -> None:
    matrix = torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64))
    gradient = torch.tensor([[1.0, 1e-3]], dtype=torch.float64)
    step = solve_within(lambda z: z @ matrix, gradient, radius=5.0, accuracy=1e-6, most_products=9)
    assert (step.is_inside, step.length) == (False, pytest.approx(5.0))
    assert abs(float(step.z[0, 1])) > 4.9
    model = float((gradient * step.z).sum() - 0.5 * (step.z @ matrix * step.z).sum())
    assert step.promised == pytest.approx(model)
