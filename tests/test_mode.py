"""Newton's mode against scipy's optimiser and the dense Newton decrement."""

import numpy as np
import pytest
import scipy.optimize
import torch

from bnncli.errors import NumericError
from bnncli.inference import mode as mode_module
from bnncli.inference.curvature import ggn, ggn_full
from bnncli.inference.mode import find_mode
from bnncli.layout import HeadLayout
from bnncli.targets.last_layer import LastLayerTarget

LAYOUTS = [HeadLayout(3, 4), HeadLayout(3, 4, has_bias=False), HeadLayout(1, 4), HeadLayout(1, 4, has_bias=False)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def make_target(layout: HeadLayout, prior_precision: float = 0.3) -> LastLayerTarget:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, layout.num_features, generator=generator, dtype=torch.float64)
    labels = (features[:, 0] + torch.randn(60, generator=generator) > 0).long()
    return LastLayerTarget(features, labels, layout, prior_precision)


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
    precision = ggn_full(target, found.theta) + 0.3 * torch.eye(layout.num_params)
    gap = found.theta - torch.tensor(mode_by_scipy(target))
    assert found.newton_decrement < 0.5
    assert found.newton_decrement == pytest.approx(float(gap @ precision @ gap) ** 0.5, rel=0.15, abs=1e-4)


@every_layout
def test_a_kronecker_whitening_leads_to_the_same_mode(layout: HeadLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(layout)
    full = find_mode(target, far_start(layout), tolerance=1e-8)
    monkeypatch.setattr(mode_module, "_MAX_FULL_PARAMS", 0)
    kron = find_mode(target, far_start(layout), tolerance=1e-8)
    assert set(kron.hessian) == {"hessian.kron.A", "hessian.kron.B"}
    torch.testing.assert_close(kron.theta, full.theta, rtol=0, atol=1e-7)


@every_layout
def test_a_polished_mode_keeps_to_the_tolerance_with_one_evaluation_less(
    layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, evaluations = make_target(layout), []

    def counted(*words: object) -> object:
        evaluations.append(1)
        return evaluate(*words)

    evaluate = mode_module._evaluate
    monkeypatch.setattr(mode_module, "_evaluate", counted)
    counts = []
    for tolerance in (0.1, 1e-3, 1e-5):
        for polish in (False, True):
            evaluations.clear()
            found = find_mode(target, far_start(layout), tolerance=tolerance, polish=polish)
            counts.append(len(evaluations))
            precision = ggn_full(target, found.theta) + 0.3 * torch.eye(layout.num_params)
            gap = found.theta - torch.tensor(mode_by_scipy(target))
            assert float(gap @ precision @ gap) ** 0.5 < 1.2 * tolerance + 1e-6
        assert found.log_joint == pytest.approx(target.log_joint(found.theta[None]).item(), abs=tolerance)
        assert counts[-1] < counts[-2]


def test_a_hessian_from_another_prior_leads_to_the_same_mode() -> None:
    target = make_target(LAYOUTS[0])
    other = find_mode(target.with_prior_precision(30.0), far_start(LAYOUTS[0]))
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
    target = LastLayerTarget(features, torch.tensor([0, 0, 1, 1]), HeadLayout(1, 1), 1e-6)
    found = find_mode(target, torch.tensor([-40.0, 10.0]))
    assert found.theta[0] > 5
    assert found.newton_decrement < 1e-3


def test_labels_that_a_stale_hessian_does_not_fit_get_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(LAYOUTS[0])
    monkeypatch.setitem(mode_module._STALE_ITERATIONS, "full", 0)
    stale = ggn(target, 10 * far_start(LAYOUTS[0]), "full")
    found = find_mode(target, far_start(LAYOUTS[0]), hessian=stale)
    assert not torch.equal(found.hessian["hessian.full"], stale["hessian.full"])


def test_too_few_iterations_are_an_error() -> None:
    with pytest.raises(NumericError, match="no mode after 1 Newton steps"):
        find_mode(make_target(LAYOUTS[0]), far_start(LAYOUTS[0]), max_iterations=1)
