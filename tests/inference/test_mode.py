"""Newton's mode against scipy's optimiser and the dense Newton decrement."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from launches import count
from problems.heads import LAYOUTS, by_noisy_sign, every_layout, head_target
from problems.oracles import in_theta_order
from torch import Tensor

from bnncli import registry
from bnncli.curvature import ggn
from bnncli.errors import NumericError
from bnncli.inference import mode as mode_module
from bnncli.inference.mode import Mode, covariance_at, find_mode
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets import last_layer
from bnncli.targets import last_layer as products
from bnncli.targets.last_layer import LastLayerTarget

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
def test_a_polished_mode_keeps_to_the_tolerance_with_one_evaluation_less(
    layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, evaluations = make_target(layout), []

    def counted(*words: object, **more: object) -> object:
        evaluations.append(1)
        return evaluate(*words, **more)

    evaluate = mode_module._evaluated
    monkeypatch.setattr(mode_module, "_evaluated", counted)
    counts = []
    for tolerance in (0.1, 1e-3, 1e-5):
        for polish in (False, True):
            evaluations.clear()
            found = find_mode(target, far_start(layout), tolerance=tolerance, polish=polish)
            counts.append(len(evaluations))
            precision = ggn(target, found.theta, "full")["hessian.full"] + 0.3 * torch.eye(layout.num_params)
            gap = found.theta - torch.tensor(mode_by_scipy(target))
            assert float(gap @ precision @ gap) ** 0.5 < 1.2 * tolerance + 1e-6
        assert found.log_joint == pytest.approx(target.log_joint(found.theta[None]).item(), abs=tolerance)
        assert counts[-1] < counts[-2]


@every_layout
def test_a_polished_log_joint_is_that_of_where_the_last_step_ends(
    layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, values = make_target(layout), []

    def kept(*words: object, **more: object) -> object:
        values.append(evaluate(*words, **more))
        return values[-1]

    evaluate = mode_module._evaluated
    monkeypatch.setattr(mode_module, "_evaluated", kept)
    for tolerance in (0.1, 1e-3):
        found = find_mode(target, far_start(layout), tolerance=tolerance, polish=True)
        before = values[-1].value
        reached = target.log_joint(found.theta[None]).item()
        assert reached - before > 1e-9  # what the last step gained, which no pass has looked at
        assert found.log_joint - before == pytest.approx(reached - before, rel=0.15)


def test_a_hessian_from_another_prior_leads_to_the_same_mode() -> None:
    target = make_target(LAYOUTS[0])
    other = find_mode(target.with_prior(Prior(30.0)), far_start(LAYOUTS[0]))
    warm = find_mode(target, other.theta, hessian=other.hessian, tolerance=1e-8)
    cold = find_mode(target, far_start(LAYOUTS[0]), tolerance=1e-8)
    torch.testing.assert_close(warm.theta, cold.theta, rtol=0, atol=1e-7)


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


def test_labels_that_a_stale_hessian_does_not_fit_get_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(LAYOUTS[0])
    monkeypatch.setitem(mode_module._STALE_ITERATIONS, "full", 0)
    stale = ggn(target, 10 * far_start(LAYOUTS[0]), "full")
    found = find_mode(target, far_start(LAYOUTS[0]), hessian=stale)
    assert not torch.equal(found.hessian["hessian.full"], stale["hessian.full"])


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


@pytest.mark.parametrize(("prior_precision", "most"), [(0.1, 80), (10.0, 45), (1000.0, 18)])
def test_products_with_the_hessian_stay_few_under_weak_priors(
    prior_precision: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 0)
    products = []
    plain = LastLayerTarget._multiply_hessian
    monkeypatch.setattr(LastLayerTarget, "_multiply_hessian", lambda *args: products.append(1) or plain(*args))
    target = make_wide(prior_precision)
    found = find_mode(target, torch.zeros(target.layout.num_params))
    assert found.newton_decrement < 1e-3
    assert len(products) <= most


def test_conjugate_gradients_wait_for_the_device_once_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(30), torch.randn(1, 30, generator=generator, dtype=torch.float64)
    products, found = [], []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        products.append(1)
        return x @ matrix

    seen = count(lambda: found.append(mode_module.conjugate_gradients(multiply, right, 1e-6)))
    assert float((found[0][0] @ matrix - right).norm() / right.norm()) < 2e-6
    assert found[0][1] == len(products) > 10
    assert seen.syncs == 1 + len(products)
    assert seen.launches < 15 * len(products)


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
    monkeypatch.setattr(mode_module, "_structure_for", lambda target: "kron")
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
        return products._multiply_and_round(left, right)

    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: multiply)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "_structure_for", lambda target: "kron")
    found = find_mode(target, start)
    distance = distance_in_sd(target, found, exact)
    assert distance < 0.1  # posterior standard deviations
    assert len(rounded) > 20
    del rounded[:]
    gradient = torch.randn(len(exact.theta), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    here = mode_module._Place(exact.theta, 0.0, gradient)
    whitening = covariance_at(target, exact.theta, "kron").covariance
    asked = {"whitening": whitening, "accuracy": lambda distance: 1e-4}
    rough = mode_module._newton_step(target, here, is_rough=True, **asked)
    assert rounded
    del rounded[:]
    begun = mode_module._newton_step(target, here, begun=rough.white, **asked)
    afresh = mode_module._newton_step(target, here, **asked)
    assert not rounded
    assert begun.num_products <= afresh.num_products
    torch.testing.assert_close(begun.direction, afresh.direction, rtol=1e-2, atol=1e-3)
    error = (rough.direction - afresh.direction).norm() / afresh.direction.norm()
    assert 1e-4 < error < 0.2


def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of more than fifty parameters are searched as the large ones are, with products of few digits."""
    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: products._multiply_and_round)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "MAX_FULL_PRECONDITIONER", 10)


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


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0, 10_000.0])
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


def test_values_far_from_the_mode_are_of_fewer_digits_and_the_last_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = head_target(HeadLayout(6, 20), 400, prior=0.1, dtype=torch.float32)
    start = 3 * torch.randn(target.layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    digits: list[bool] = []
    evaluate = mode_module._evaluated

    def kept(*given: object, is_coarse: bool = False) -> object:
        digits.append(is_coarse)
        return evaluate(*given, is_coarse=is_coarse)

    monkeypatch.setattr(mode_module, "_evaluated", kept)
    find_mode(target, start)
    assert not any(digits)
    as_large(monkeypatch)
    monkeypatch.setattr(mode_module, "_COARSE_FROM", 1.0)
    del digits[:]
    find_mode(target, start)
    assert any(digits)
    assert not digits[-1]


@pytest.mark.parametrize("coarse_from", [0.0, 1e9])
def test_what_ends_a_search_was_looked_at_with_all_digits(monkeypatch: pytest.MonkeyPatch, coarse_from: float) -> None:
    as_large(monkeypatch)
    monkeypatch.setattr(mode_module, "_COARSE_FROM", coarse_from)
    looks: list[tuple[bool, bool]] = []
    newton_step = mode_module._newton_step

    def kept(target: LastLayerTarget, here: mode_module._Place, **more: object) -> object:
        step = newton_step(target, here, **more)
        looks.append((here.is_coarse, step.is_rough))
        return step

    monkeypatch.setattr(mode_module, "_newton_step", kept)
    target = head_target(HeadLayout(6, 20), 400, prior=0.1, dtype=torch.float32)
    start = 3 * torch.randn(target.layout.num_params, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    find_mode(target, start)
    assert looks[-2] == (coarse_from == 0, True)
    assert looks[-1] == (False, False)


def test_probabilities_of_large_heads_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = head_target(HeadLayout(6, 20), 400, prior=0.1, dtype=torch.float32)
    made: list[int] = []
    probabilities = LastLayerTarget.probabilities

    def counted(self: LastLayerTarget, theta: Tensor, features: Tensor | None = None) -> Tensor:
        made.append(1)
        return probabilities(self, theta, features)

    monkeypatch.setattr(LastLayerTarget, "probabilities", counted)
    find_mode(target, torch.zeros(target.layout.num_params))
    assert made
    as_large(monkeypatch)
    del made[:]
    find_mode(target, torch.zeros(target.layout.num_params))
    assert made == []
    assert target._kept.find(torch.zeros(target.layout.num_params)) is None


def test_the_last_step_counts_what_rough_solutions_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(6, 20)
    target = head_target(layout, 400, prior=0.1, dtype=torch.float64)
    exact = find_mode(target, torch.zeros(layout.num_params), tolerance=1e-9)
    monkeypatch.setattr(mode_module, "_MANY", 50)
    monkeypatch.setattr(mode_module, "_structure_for", lambda target: "kron")
    monkeypatch.setattr(mode_module, "_accuracy", lambda distance, **_: 0.5)
    for tolerance in (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01):
        found = find_mode(target, torch.zeros(layout.num_params), tolerance=tolerance)
        distance = distance_in_sd(target, found, exact)
        assert distance < 1.2 * tolerance  # an estimate, by steps that are solved to a half


def test_steps_far_from_the_mode_are_solved_as_well_as_the_last_one_went() -> None:
    forcing = mode_module._Forcing(200_000, lambda distance: 0.1, 0.02)
    given = [forcing(distance) for distance in (900.0, 450.0, 400.0, 100.0, 5.0, 2.0, 0.125)]
    assert given == pytest.approx([0.5, 0.9 / 4, 0.5, 0.1, 0.1, 0.05, 0.08])
    assert [mode_module._Forcing(100_000, lambda distance: 0.1, 0.02)(distance) for distance in (900.0, 5.0)] == [
        0.1,
        0.1,
    ]
