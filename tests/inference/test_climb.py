"""Modes of targets that are not concave, against scipy's trust region, dense algebra and the last layer's mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.errors import NumericError
from bnncli.inference import mode as climb_module
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import climb, find_mode, solve_within
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

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


def mode_by_scipy() -> tuple[np.ndarray, float]:
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
    theta, value = mode_by_scipy()
    found = climb(target, target.layout.trained(), tolerance=1e-6)
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
    found = climb(target, target.layout.trained(), tolerance=1e-6)
    last = LastLayerTarget(target.inputs, target.labels, HeadLayout(3, 4), target.prior)
    expected = find_mode(last, torch.zeros(15), tolerance=1e-6)
    torch.testing.assert_close(found.theta, expected.theta, rtol=0, atol=1e-6)
    assert found.log_joint == pytest.approx(expected.log_joint, abs=1e-9)


def test_a_saddle_is_left() -> None:
    target = tanh_network()
    start = 1e-3 * target.layout.trained()
    assert float(torch.linalg.eigvalsh(dense_hessian(target, start))[0]) < -1
    found = climb(target, start)
    assert float(torch.linalg.eigvalsh(dense_hessian(target, found.theta))[0]) > 0
    assert found.log_joint > float(target.log_joint(start[None])) + 5


def test_units_with_kinks_end_where_nothing_near_is_higher_or_say_how_far() -> None:
    target = relu_network()
    start = target.layout.trained()
    found = climb(target, start)
    assert (found.newton_decrement < 1e-3) == (found.shortfall is None)
    assert found.newton_decrement < max(1.0, 0.05 * math.sqrt(len(start)))
    around = found.theta + 0.003 * torch.randn(100, len(start), generator=seeded(4), dtype=torch.float64)
    assert float(target.log_joint(around).max()) < found.log_joint + 1e-3


def test_a_search_that_may_not_go_on_says_how_far_it_came() -> None:
    target = tanh_network()
    with pytest.raises(
        NumericError, match=r"no mode after \d+ passes over the data: .* away.*; the limit of 9 passes was reached"
    ):
        climb(target, target.layout.trained() * 0 + 0.1, most_passes=9)


def test_a_search_that_ends_near_gives_what_it_has_and_no_evidence_where_that_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tanh_network()
    start = target.layout.trained()
    monkeypatch.setattr(climb_module, "NEAR", math.inf)
    monkeypatch.setattr(climb_module, "MOST_PASSES", 12)
    fit = fit_gaussian(target, start=start)
    assert fit.mode is not None
    assert fit.mode.shortfall == "the limit of 12 passes was reached"
    gradient = target.log_joint_and_grad(fit.mode.theta[None])[1][0]
    precision = target.hessian_operator(fit.mode.theta)(torch.eye(len(start)))
    exact = float(gradient @ torch.linalg.solve(precision, gradient)) ** 0.5
    assert fit.mode.newton_decrement == pytest.approx(exact, rel=0.1)
    assert exact > 1
    assert fit.log_marginal_likelihood is None
    assert "nats higher" in str(fit.no_evidence)


def test_passes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"gradient": 0, "product": 0}
    gradient, products = NetworkTarget.log_joint_and_grad, NetworkTarget.second_derivatives

    def counted(target: NetworkTarget, theta: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
        made["gradient"] += 1
        return gradient(target, theta, **words)

    def counting(target: NetworkTarget, theta: Tensor) -> Callable[[Tensor], Tensor]:
        multiply = products(target, theta)

        def product(vectors: Tensor) -> Tensor:
            made["product"] += 1
            return multiply(vectors)

        return product

    monkeypatch.setattr(NetworkTarget, "log_joint_and_grad", counted)
    monkeypatch.setattr(NetworkTarget, "second_derivatives", counting)
    target = tanh_network()
    found = climb(target, target.layout.trained())
    assert made["product"] > 3
    assert found.num_passes is not None
    whitenings = found.num_passes - made["gradient"] - 2 * made["product"]
    assert whitenings in (4, 8, 12)


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


def test_steps_go_along_negative_curvature_to_the_edge() -> None:
    matrix = torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64))
    gradient = torch.tensor([[1.0, 1e-3]], dtype=torch.float64)
    step = solve_within(lambda z: z @ matrix, gradient, radius=5.0, accuracy=1e-6, most_products=9)
    assert (step.is_inside, step.length) == (False, pytest.approx(5.0))
    assert abs(float(step.z[0, 1])) > 4.9
