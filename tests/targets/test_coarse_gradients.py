"""Gradients with few digits: how the digits are rounded, what the gradient loses, and that draws lose nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.seeds import seeded
from torch import Tensor

from bnncli.inference.dynamics import DYNAMICS, WhitenedPotential, trajectory
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.system.devices import configure_torch
from bnncli.targets import last_layer, variants
from bnncli.targets import last_layer as products
from bnncli.targets.last_layer import LastLayerTarget, multiply_halves, multiply_in, rough_multiply, round_to_tf32
from bnncli.targets.variants import CoarseGradient

DIGITS = {"tf32": 11, "bfloat16": 8}  # bits, the leading one included
every_precision = pytest.mark.parametrize("precision", DIGITS)
LAYOUTS = [HeadLayout(3, 6), HeadLayout(1, 6), HeadLayout(4, 6, has_bias=False)]


def rounded(values: Any, bits: int) -> np.ndarray:
    """The nearest numbers of so many bits, ties to even, in float64."""
    fraction, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.ldexp(np.rint(fraction * 2.0**bits) / 2.0**bits, exponent)


def make_target(layout: HeadLayout, num_examples: int = 200) -> LastLayerTarget:
    features = torch.randn(num_examples, layout.num_features, generator=seeded()) + 2
    labels = (features[:, : layout.num_classes] + torch.randn(num_examples, 1, generator=seeded(1))).argmax(dim=1)
    return LastLayerTarget(features, labels, layout, Prior(0.5, 0.2), likelihood_scale=1.5)


def anchor_of(target: LastLayerTarget) -> Tensor:
    return torch.randn(target.layout.num_params, generator=seeded(2), dtype=torch.float64)


def errors(target: LastLayerTarget, precision: str, displacement: Tensor) -> Tensor:
    """Lengths, (S,), of what the coarse gradient (S, P) is off by."""
    anchor = anchor_of(target)
    exact = target.log_joint_and_grad(anchor + displacement, dtype=torch.float64)[1]
    return (CoarseGradient.about(target, anchor, precision)(displacement) - exact).norm(dim=1)


def test_tf32_numbers_are_the_nearest_of_eleven_bits() -> None:
    halfway = [1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11)]
    values = torch.cat([torch.randn(1000, generator=seeded()) * 1e20, torch.tensor([*halfway, 0.0, -0.0, 3e38])])
    np.testing.assert_array_equal(round_to_tf32(values).numpy(), rounded(values, 11).astype(np.float32))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(round_to_tf32(special), special, rtol=0, atol=0, equal_nan=True)


@every_precision
def test_products_are_of_rounded_numbers_and_summed_in_float32(precision: str) -> None:
    left, right = (torch.randn(*shape, generator=seeded()) for shape in ((7, 300), (300, 5)))
    got = multiply_in(precision)(left, right.T.contiguous().T).numpy()
    expected = rounded(left, DIGITS[precision]) @ rounded(right, DIGITS[precision])
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
    assert np.abs(got - left.double().numpy() @ right.double().numpy()).max() > 1e-3


@every_precision
def test_a_gpu_multiplies_by_itself_and_means_the_same(precision: str) -> None:
    configure_torch(threads=None, deterministic=False)
    left, right = (torch.randn(*shape, generator=seeded()) for shape in ((4, 30), (30, 5)))
    with pretend_cuda.pretend() as gpu:
        on_gpu = multiply_in(precision)(left.to(gpu.device), right.to(gpu.device))
        assert torch.get_float32_matmul_precision() == "highest"
        exact = left.to(gpu.device) @ right.to(gpu.device)
    names = set(gpu.kernels)
    assert gpu.problems() == []
    assert names <= {"mm", "_to_copy", "copy_"}  # nothing is rounded apart
    assert torch.equal(on_gpu.cpu(), multiply_in(precision)(left, right))
    assert torch.equal(exact.cpu(), left @ right)


def test_rough_products_are_of_bfloat16_numbers_where_the_device_is_faster_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = (torch.randn(*shape, generator=seeded()) for shape in ((7, 300), (300, 5)))
    expected = rounded(left, 8) @ rounded(right, 8)
    cpu = torch.device("cpu")
    monkeypatch.setattr(products, "has_bfloat16_products", lambda device: True)
    multiply = rough_multiply(cpu)
    assert multiply is not None
    np.testing.assert_allclose(multiply(left, right).numpy(), expected, rtol=2.0**-8, atol=2e-5)
    with pretend_cuda.pretend() as gpu:
        multiply = rough_multiply(gpu.device)
        assert multiply is not None
        on_gpu = multiply(left.to(gpu.device), right.to(gpu.device))
    np.testing.assert_allclose(on_gpu.cpu().numpy(), expected, rtol=0, atol=2e-5)
    monkeypatch.setattr(products, "has_bfloat16_products", lambda device: False)
    assert rough_multiply(cpu) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rough_products_with_the_hessian_are_right_to_a_percent(
    layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_bfloat16_products", lambda device: True)
    target = make_target(layout, num_examples=500)
    theta, vectors = anchor_of(target), torch.randn(3, layout.num_params, generator=seeded(5), dtype=torch.float64)
    exact = target.hessian_operator(theta)(vectors)
    rough = target.hessian_operator(theta, is_rough=True)(vectors)
    error = (rough - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error < 0.01).all()
    assert (error > 1e-5).all()
    double = LastLayerTarget(target.features.double(), target.labels, layout, target.prior)
    assert torch.equal(double.hessian_operator(theta, is_rough=True)(vectors), double.hessian_operator(theta)(vectors))


@every_precision
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_error_is_of_the_way_from_the_anchor(precision: str, layout: HeadLayout) -> None:
    target = make_target(layout)
    way = torch.randn(6, layout.num_params, generator=seeded(3), dtype=torch.float64)
    lengths = [1e-1, 1e-3, 0.0]
    far, near, none = (errors(target, precision, length * way).mean() for length in lengths)
    size = (target.log_joint_and_grad(anchor_of(target) + 0.1 * way)[1] - target.log_joint_and_grad(anchor_of(target)[None])[1]).norm(dim=1).mean()  # fmt: skip
    digits = 2.0 ** -DIGITS[precision]
    assert 0.02 * digits * size < far < 2 * digits * size
    assert near < 0.03 * far + 1e-4 * digits * size + 1e-4
    assert none < 1e-9


@every_precision
def test_logits_that_are_not_kept_are_made_again(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(LAYOUTS[0])
    way = 0.1 * torch.randn(3, target.layout.num_params, generator=seeded(3), dtype=torch.float64)
    kept = CoarseGradient.about(target, anchor_of(target), precision)
    monkeypatch.setattr(variants, "is_kept", lambda size, device: False)
    made = CoarseGradient.about(target, anchor_of(target), precision)
    assert kept.logits is not None
    assert made.logits is None
    torch.testing.assert_close(made(way), kept(way), rtol=1e-3, atol=1e-3)


@every_precision
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_trajectories_are_reversible_whatever_kicks(precision: str, dynamics: str) -> None:
    target = make_target(LAYOUTS[0], num_examples=60)
    base = fit_gaussian(target, start=torch.zeros(target.layout.num_params), structure="full").gaussian
    coarse = CoarseGradient.about(target, base.mean, precision)
    potential = WhitenedPotential(target, base.mean, base.covariance, coarse)
    z, momentum = torch.randn(2, 5, target.layout.num_params, generator=seeded(4), dtype=torch.float64)
    options: dict[str, Any] = {"step_size": 0.3, "num_steps": 4, "dynamics": dynamics}
    end, end_momentum = trajectory(potential, potential.state(z), momentum, **options)
    assert end.potential.isnan().all()  # it is not known before it is asked for
    torch.testing.assert_close(potential.with_energy(end).potential, -target.log_joint(potential.theta(end.z)))
    back, back_momentum = trajectory(potential, end, -end_momentum, **options)
    # Rounding is discontinuous: where the way back differs in the last digit, a number may round to its neighbour.
    torch.testing.assert_close(back.z, z, rtol=0, atol=1e-3)
    torch.testing.assert_close(back_momentum, -momentum, rtol=0, atol=1e-3)
    plain, _ = trajectory(
        replace(potential, coarse=None), replace(potential, coarse=None).state(z), momentum, **options
    )
    assert float((plain.z - end.z).abs().max()) > 0


def test_a_product_of_float16_parts_keeps_the_digits_of_float32() -> None:
    left, right = torch.randn(9, 3000, generator=seeded()), torch.randn(3000, 7, generator=seeded(1)).half()
    left[:, ::3] *= 1e-5
    for factor in (1.0, 1e-30, 1e30):
        with pretend_cuda.pretend() as gpu:
            got = multiply_halves((left * factor).to(gpu.device), right.to(gpu.device)).cpu().double() / factor
        exact = left.double() @ right.double()
        assert (got - exact).norm() < 2e-6 * exact.norm()
        assert (got - left.half().double() @ right.double()).norm() > 1e-4 * exact.norm()
    with pretend_cuda.pretend() as gpu:
        assert not multiply_halves(torch.zeros(2, 3000, device=gpu.device), right.to(gpu.device)).any()


def test_a_large_head_on_a_gpu_reads_float16_features_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def spied(left: Tensor, right: Tensor) -> Tensor:
        seen.append(right.dtype)
        return multiply_halves(left, right)

    monkeypatch.setattr(last_layer, "multiply_halves", spied)
    layout = HeadLayout(130, 1010)
    features = torch.randn(70, layout.num_features, generator=seeded()).half()
    labels = torch.randint(layout.num_classes, (70,), generator=seeded(1))
    theta = 0.05 * torch.randn(3, layout.num_params, generator=seeded(2))
    value, gradient = LastLayerTarget(features, labels, layout, Prior(0.5)).log_joint_and_grad(
        theta, dtype=torch.float64
    )
    with pretend_cuda.pretend() as gpu:
        target = LastLayerTarget(features.to(gpu.device), labels.to(gpu.device), layout, Prior(0.5))
        on_gpu, gradient_on_gpu = (part.cpu() for part in target.log_joint_and_grad(theta.to(gpu.device)))
        energies = target.log_joint(theta.to(gpu.device)).cpu()
        assert gpu.problems() == []
    assert seen == [torch.float16] * 3  # logits and sums of the gradient, logits of the energy
    torch.testing.assert_close(on_gpu, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(energies, value, rtol=1e-6, atol=0)
    assert (gradient_on_gpu - gradient).norm() < 3e-6 * gradient.norm()
