"""The target of a last layer: coarse gradients, Gram matrices, kept probabilities, shards and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.heads import LAYOUTS, draw_theta, every_layout, head_target
from problems.oracles import in_theta_order, negative_log_likelihood
from problems.seeds import seeded
from torch import Tensor

from bnncli.errors import DataError
from bnncli.inference.dynamics import DYNAMICS, WhitenedPotential, trajectory
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import full, ggn
from bnncli.structures.full import Full
from bnncli.structures.logits import head_spread
from bnncli.system.devices import configure_torch
from bnncli.system.workers import Team, shares
from bnncli.targets import blocks as stream
from bnncli.targets import grams, last_layer, variants
from bnncli.targets.blocks import FeatureBlocks, gather_sums, node_places, row_slices, shard_rows, sum_shards
from bnncli.targets.grams import (
    pack_quadratic_form,
    packed_grams,
    packed_positions,
    packed_products,
    quadratic_forms,
    unpack_symmetric,
    weighted_grams,
)
from bnncli.targets.last_layer import LastLayerTarget, multiply_halves, multiply_in, rough_multiply, round_to_tf32
from bnncli.targets.variants import CoarseGradient, ManyLabels, SubsetResidual, residual_sizes

make_target = partial(head_target, prior=0.7)


def naive_log_joint(target: LastLayerTarget, theta: Tensor) -> Tensor:
    scale = torch.tensor(target.prior.weight_precision**-0.5, dtype=torch.float64)
    prior = torch.distributions.Normal(torch.zeros_like(scale), scale).log_prob(theta).sum()
    return prior - target.likelihood_scale * negative_log_likelihood(target, theta)


@every_layout
def test_log_joint_is_the_textbook_log_posterior(layout: HeadLayout) -> None:
    target, theta = make_target(layout, likelihood_scale=2.5), draw_theta(layout, 5)
    expected = torch.stack([naive_log_joint(target, one) for one in theta])
    torch.testing.assert_close(target.log_joint(theta), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(target.log_joint_and_grad(theta)[0], expected, rtol=1e-12, atol=0)


@every_layout
def test_gradient_is_autograds(layout: HeadLayout) -> None:
    target, theta = make_target(layout, likelihood_scale=2.5), draw_theta(layout, 5)
    leaf = theta.clone().requires_grad_()
    torch.stack([naive_log_joint(target, one) for one in leaf]).sum().backward()
    torch.testing.assert_close(target.log_joint_and_grad(theta)[1], leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("has_bias", [True, False])
def test_label_sums_are_sums_of_the_features_of_each_class(has_bias: bool) -> None:
    layout = HeadLayout(7, 5, has_bias=has_bias)
    features, labels = draw_theta(HeadLayout(1, 5, has_bias=False), 40), torch.arange(40) % 6  # none of the last
    expected = torch.stack([features[labels == k].sum(dim=0) for k in range(7)])
    weight, bias = layout.split(last_layer.label_sums(features, labels, layout)[None])
    torch.testing.assert_close(weight[0], expected)
    if has_bias:
        torch.testing.assert_close(bias[0], torch.bincount(labels, minlength=7).double())


def test_some_rows_are_a_target_of_their_own() -> None:
    target = make_target(HeadLayout(3, 4))
    theta, rows = draw_theta(target.layout, 2), torch.tensor([1, 4, 5])
    part = target.some(rows)
    alone = LastLayerTarget(target.features[rows], target.labels[rows], target.layout, target.prior)
    torch.testing.assert_close(part.log_joint(theta), alone.log_joint(theta))


@every_layout
def test_autograd_passes_through_log_joint(layout: HeadLayout) -> None:
    target, leaf = make_target(layout), draw_theta(layout, 5).requires_grad_()
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (target.log_joint(2 * leaf) * weights).sum().backward()
    expected = 2 * weights[:, None] * target.log_joint_and_grad(2 * leaf.detach())[1]
    torch.testing.assert_close(leaf.grad, expected)


@every_layout
def test_hessian_vector_product_is_autograds(layout: HeadLayout) -> None:
    target, theta = make_target(layout, likelihood_scale=2.5), draw_theta(layout, 5)
    hessian = torch.autograd.functional.hessian(lambda one: -naive_log_joint(target, one), theta[0])
    product = target.hessian_vector_product(theta[0], theta[1:])
    torch.testing.assert_close(product, theta[1:] @ hessian, rtol=1e-11, atol=1e-11)


@every_layout
def test_small_blocks_give_the_same_as_one(layout: HeadLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5)
    whole = (*target.log_joint_and_grad(theta), target.hessian_vector_product(theta[0], theta))
    monkeypatch.setitem(stream.BLOCK_ELEMENTS, "cpu", 40)
    monkeypatch.setitem(last_layer._MAX_ROWS, "cpu", 6)
    blocks = (*target.log_joint_and_grad(theta), target.hessian_vector_product(theta[0], theta))
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)


@every_layout
def test_minibatches_of_a_partition_average_to_the_whole(layout: HeadLayout) -> None:
    target, theta = make_target(layout, likelihood_scale=2.5), draw_theta(layout, 5)
    examples = [target.examples(index) for index in torch.arange(30).split(10)]
    parts = [target.minibatch(*some).log_joint_and_grad(theta)[0] - target.log_prior(theta) for some in examples]
    torch.testing.assert_close(torch.stack(parts).mean(dim=0), target.log_likelihood(theta))


@every_layout
def test_fast_minibatch_agrees_with_the_target(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout, 5)
    batch = target.minibatch(*target.examples(torch.arange(30)))
    value, gradient = batch.log_likelihood_and_grad(theta)
    torch.testing.assert_close(value, target.log_likelihood(theta))
    expected = target.log_joint_and_grad(theta)[1] + target.prior.weight_precision * theta
    torch.testing.assert_close(gradient, expected)


@every_layout
def test_huge_logits_stay_finite(layout: HeadLayout) -> None:
    target, theta = make_target(layout), 1e6 * draw_theta(layout, 5)
    value, gradient = target.log_joint_and_grad(theta)
    assert torch.isfinite(value).all()
    torch.testing.assert_close(target.log_joint(theta), value)
    assert torch.isfinite(gradient).all()


def test_single_precision_products_keep_energies_to_a_hundredth_of_a_nat() -> None:
    exact, theta = make_target(HeadLayout(3, 4), num_examples=20_000), draw_theta(LAYOUTS[0], 5)
    single = LastLayerTarget(exact.features.float(), exact.labels, exact.layout, Prior(0.7))
    double = LastLayerTarget(single.features.double(), exact.labels, exact.layout, Prior(0.7))
    theta = theta.float()
    torch.testing.assert_close(single.log_joint(theta), double.log_joint(theta), rtol=0, atol=1e-2)
    gradients = single.log_joint_and_grad(theta)[1], double.log_joint_and_grad(theta)[1]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(single.log_joint_and_grad(theta, dtype=torch.float64)[1], gradients[1])


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_outside_the_classes_are_refused(label: int) -> None:
    labels = torch.tensor([0, label])
    with pytest.raises(DataError, match=r"expected labels from 0 to 2"):
        LastLayerTarget(torch.zeros(2, 4), labels, LAYOUTS[0], Prior(1.0))


def test_features_that_are_not_finite_are_counted() -> None:
    features = torch.tensor([[0.0, math.nan, math.inf, 1.0]])
    with pytest.raises(DataError, match="2 values that are not finite"):
        LastLayerTarget(features, torch.tensor([0]), LAYOUTS[0], Prior(1.0))


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(DataError, match="5 columns, but the head expects 4"):
        LastLayerTarget(torch.zeros(2, 5), torch.tensor([0, 1]), LAYOUTS[0], Prior(1.0))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_prior_precision_must_be_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match="weight_precision must be positive"):
        make_target(LAYOUTS[0]).with_prior(Prior(value))


DIGITS = {"tf32": 11, "bfloat16": 8}  # bits, the leading one included
every_precision = pytest.mark.parametrize("precision", DIGITS)
COARSE_LAYOUTS = [HeadLayout(3, 6), HeadLayout(1, 6), HeadLayout(4, 6, has_bias=False)]


def rounded(values: Any, bits: int) -> np.ndarray:
    """The nearest numbers of so many bits, ties to even, in float64."""
    fraction, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.ldexp(np.rint(fraction * 2.0**bits) / 2.0**bits, exponent)


def coarse_target(layout: HeadLayout, num_examples: int = 200) -> LastLayerTarget:
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
    monkeypatch.setattr(last_layer, "has_bfloat16_products", lambda device: True)
    multiply = rough_multiply(cpu)
    np.testing.assert_allclose(multiply(left, right).numpy(), expected, rtol=2.0**-8, atol=2e-5)
    with pretend_cuda.pretend() as gpu:
        multiply = rough_multiply(gpu.device)
        on_gpu = multiply(left.to(gpu.device), right.to(gpu.device))
    np.testing.assert_allclose(on_gpu.cpu().numpy(), expected, rtol=0, atol=2e-5)
    monkeypatch.setattr(last_layer, "has_bfloat16_products", lambda device: False)
    assert rough_multiply(cpu) is None


@pytest.mark.parametrize("layout", COARSE_LAYOUTS, ids=str)
def test_rough_products_with_the_hessian_are_right_to_a_percent(
    layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_layer, "has_bfloat16_products", lambda device: True)
    target = coarse_target(layout, num_examples=500)
    theta, vectors = anchor_of(target), torch.randn(3, layout.num_params, generator=seeded(5), dtype=torch.float64)
    exact = target.hessian_operator(theta)(vectors)
    rough = target.hessian_operator(theta, is_rough=True)(vectors)
    error = (rough - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error < 0.01).all()
    assert (error > 1e-5).all()
    double = LastLayerTarget(target.features.double(), target.labels, layout, target.prior)
    assert torch.equal(double.hessian_operator(theta, is_rough=True)(vectors), double.hessian_operator(theta)(vectors))


@every_precision
@pytest.mark.parametrize("layout", COARSE_LAYOUTS, ids=str)
def test_the_error_is_of_the_way_from_the_anchor(precision: str, layout: HeadLayout) -> None:
    target = coarse_target(layout)
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
    target = coarse_target(COARSE_LAYOUTS[0])
    way = 0.1 * torch.randn(3, target.layout.num_params, generator=seeded(3), dtype=torch.float64)
    kept = CoarseGradient.about(target, anchor_of(target), precision)
    monkeypatch.setattr(variants, "fits_cache", lambda size, device: False)
    made = CoarseGradient.about(target, anchor_of(target), precision)
    assert kept.logits is not None
    assert made.logits is None
    torch.testing.assert_close(made(way), kept(way), rtol=1e-3, atol=1e-3)


def beyond_second_order(target: LastLayerTarget, displacement: Tensor) -> Tensor:
    """The gradient of the log joint at a displacement (S, P) from the anchor, less its linear part there, in float64."""
    anchor = anchor_of(target)
    there, here = (
        target.log_joint_and_grad(at, dtype=torch.float64)[1] for at in (anchor + displacement, anchor[None])
    )
    return there - here + target.hessian_vector_product(anchor, displacement)


@pytest.mark.parametrize("layout", COARSE_LAYOUTS, ids=str)
def test_a_subset_estimates_the_gradient_beyond_second_order_without_bias(layout: HeadLayout) -> None:
    target = coarse_target(layout)
    way = 0.3 * torch.randn(3, layout.num_params, generator=seeded(3), dtype=torch.float64)
    expected, anchor = beyond_second_order(target, way), anchor_of(target)
    sizes = residual_sizes(target, anchor, way)
    whole = SubsetResidual.draw(target, anchor, sizes, target.num_examples, seeded())
    assert whole.share == 1
    torch.testing.assert_close(whole(way), expected, rtol=1e-3, atol=1e-3)
    drawn = [SubsetResidual.draw(target, anchor, sizes, 20, seeded(seed)) for seed in range(200)]
    assert {round(200 * one.share) for one in drawn} <= {19, 20, 21}
    found = torch.stack([one(way) for one in drawn])
    error = found.std(dim=0) / math.sqrt(len(drawn))
    assert float(((found.mean(dim=0) - expected) / error).abs().max()) < 5
    for row in (0, 7, 50):
        alone = beyond_second_order(target.some(torch.tensor([row])), way) / target.likelihood_scale
        assert float(sizes[row]) == pytest.approx(float(alone.square().sum(dim=1).mean().sqrt()), rel=1e-3)


@every_precision
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_trajectories_are_reversible_whatever_kicks(precision: str, dynamics: str) -> None:
    target = coarse_target(COARSE_LAYOUTS[0], num_examples=60)
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


every_route = pytest.mark.parametrize("packs", [True, False], ids=["packed", "square"])


def take_route(monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    for module in (grams, full):
        monkeypatch.setattr(module, "is_packed", lambda *words: packs)


def make_problem(count: int, size: int, num_examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(num_examples, size, generator=generator) + 1  # sums grow: float32 alone would lose digits
    return torch.rand(count, num_examples, generator=generator), features


@every_route
@pytest.mark.parametrize(("count", "size"), [(1, 70), (3, 33), (6, 40), (2, 1)])
def test_grams_of_long_sums_are_those_of_float64(packs: bool, count: int, size: int) -> None:
    weights, features = make_problem(count, size, 8000)
    expected = torch.einsum("mn,ni,nj->mij", weights.double(), features.double(), features.double())

    def rows_of(rows: slice) -> Tensor:
        return weights[:, rows]

    if packs:
        got = unpack_symmetric(packed_grams(rows_of, features), packed_positions(size, features.device)[0])
    else:
        got = weighted_grams(rows_of, features, count=count)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=0)


@every_route
@pytest.mark.parametrize(("count", "size"), [(1, 70), (3, 33), (6, 4), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quadratic_forms_are_those_of_einsum(
    packs: bool, count: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_route(monkeypatch, packs)
    features = make_problem(count, size, 1500)[1].to(dtype)
    matrices = torch.randn(count, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.einsum("ni,mij,nj->nm", features.double(), matrices, features.double())
    got = quadratic_forms(features, matrices.to(dtype))
    error = (got.double() - expected).abs().max() / (features.double().square().sum(dim=1).max() * matrices.abs().max())
    assert error < (1e-6 if dtype == torch.float32 else 1e-15) * size**0.5


@pytest.mark.parametrize("size", [1, 7, 32, 33, 70, 131])
def test_packed_products_have_a_coefficient_for_every_pair(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, x = (torch.randn(*shape, size, generator=generator, dtype=torch.float64) for shape in ((size,), (1,)))
    packed = packed_products(x)
    torch.testing.assert_close(unpack_symmetric(packed[:, 0], packed_positions(size, x.device)[0]), x.T @ x)
    torch.testing.assert_close(pack_quadratic_form(matrix) @ packed[:, 0], (x @ matrix @ x.T)[0, 0])
    assert len(packed) <= size * (size + 1) / 2 * (1 + 2 / 32)


def gram_target(layout: HeadLayout, num_examples: int) -> tuple[LastLayerTarget, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_examples, layout.num_features, generator=generator)
    labels = torch.randint(layout.num_classes, (num_examples,), generator=generator)
    theta = torch.randn(layout.num_params, generator=generator, dtype=torch.float64) / layout.num_features
    return LastLayerTarget(features, labels, layout, Prior(1.0)), theta


def dense_hessian(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """sum_n (diag(p) - p p^T) kron x x^T in float64, theta order."""
    layout = target.layout
    logits = layout.logits(target.features.double(), theta[None])[0]
    p = logits.softmax(dim=1)
    each = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    if layout.num_outputs == 1:
        each = (logits.sigmoid() * (1 - logits.sigmoid())).unsqueeze(2)
    x = layout.augment_features(target.features).double()
    dense = torch.einsum("nkl,ni,nj->kilj", each, x, x).reshape(layout.num_params, -1)
    return in_theta_order(dense, layout)


@every_route
@pytest.mark.parametrize("layout", [HeadLayout(2, 40), HeadLayout(5, 33, has_bias=False), HeadLayout(1, 50)], ids=str)
def test_the_full_hessian_is_the_sum_over_examples(
    layout: HeadLayout, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_route(monkeypatch, packs)
    target, theta = gram_target(layout, 2000)
    got, expected = ggn(target, theta, "full")["hessian.full"], dense_hessian(target, theta)
    assert torch.equal(got, got.T)
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-7


@every_route
def test_logit_moments_are_those_of_sigma(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    take_route(monkeypatch, packs)
    layout = HeadLayout(3, 40)
    target, theta = gram_target(layout, 400)
    covariance = Full.from_hessian(ggn(target, theta, "full"), Prior(1.0), layout)
    sigma = layout.augment(layout.augment(covariance.scale_tril @ covariance.scale_tril.T).permute(1, 2, 0))
    x = layout.augment_features(target.features).double()
    expected = torch.einsum("kalb,na,nb->nkl", sigma.permute(2, 3, 0, 1), x, x)
    torch.testing.assert_close(head_spread(covariance, layout).covariance(target.features.double()), expected)
    single = head_spread(covariance.to(dtype=torch.float32), layout)
    variance = single.variance(target.features).double()
    torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0)
    less_mean = torch.eye(3, dtype=torch.float64) - 1 / 3
    projected = (less_mean @ expected @ less_mean).diagonal(dim1=1, dim2=2)
    got = single.projected_variance(target.features).double()
    torch.testing.assert_close(got, projected, rtol=1e-4, atol=0)


LAYOUT = HeadLayout(4, 7)


@pytest.fixture
def target() -> LastLayerTarget:
    return head_target(LAYOUT, 50, prior=0.5, dtype=torch.float32)


def thetas(count: int) -> Tensor:
    return torch.randn(count, LAYOUT.num_params, generator=seeded(), dtype=torch.float64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that probabilities were made again."""
    count: list[int] = []
    probabilities = LastLayerTarget.probabilities

    def counted(self: LastLayerTarget, theta: Tensor, features: Tensor | None = None) -> Tensor:
        count.append(1)
        return probabilities(self, theta, features)

    monkeypatch.setattr(LastLayerTarget, "probabilities", counted)
    return count


def test_a_hessian_where_the_target_was_evaluated_makes_none_again(target: LastLayerTarget, made: list[int]) -> None:
    theta, vector = thetas(2)
    plain = target.hessian_vector_product(theta, vector.unsqueeze(0))
    factors = ggn(target, theta, "kron")
    del made[:]
    with target.keeping():
        target.log_joint_and_grad(theta.unsqueeze(0))
        torch.testing.assert_close(target.hessian_vector_product(theta, vector.unsqueeze(0)), plain)
        for name, value in ggn(target, theta, "kron").items():
            torch.testing.assert_close(value, factors[name])
        for value in ggn(target, theta, "kron", before=factors).values():
            assert torch.isfinite(value).all()
        assert made == []


def test_what_is_kept_is_of_one_theta_and_of_the_time_within(target: LastLayerTarget, made: list[int]) -> None:
    theta, other = thetas(2)

    def is_kept(one: Tensor) -> bool:
        """Whether probabilities at theta are there without being made; they are right either way."""
        before = len(made)
        found = target.row_probabilities(one)(slice(0, 5), target.features[:5])
        is_there = len(made) == before
        torch.testing.assert_close(found, target.probabilities(one, target.features[:5]))
        return is_there

    with target.keeping():
        target.log_joint_and_grad(theta.unsqueeze(0))
        assert not is_kept(other)
        assert is_kept(theta)
        target.log_joint_and_grad(other.unsqueeze(0))  # takes the place
        assert not is_kept(theta)
        target.log_joint_and_grad(torch.stack([theta, other]))  # of which of the two?
        assert not is_kept(theta)
        moving = theta.unsqueeze(0).clone()
        target.log_joint_and_grad(moving, dtype=torch.float64)
        assert is_kept(theta)
        moving += 1  # in place: theta is where it was
        assert is_kept(theta)
        assert not is_kept(moving[0])
    assert not is_kept(theta)


@dataclass(frozen=True)
class Together(Team):
    """A worker whose others have done their part already: what each has sent is known."""

    sent: tuple[torch.Tensor, ...] = ()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.equal(self.sent[self.rank])
        return [one.clone() for one in self.sent]


def packed(values: list[torch.Tensor], part: range, most: int) -> torch.Tensor:
    """What a worker sends of its shards' values."""
    nodes = sum_shards((shard, (values[shard].clone(),)) for shard in part).nodes
    found = torch.zeros(most, *values[0].shape, dtype=torch.float64)
    for row, (_, _, sums) in enumerate(nodes):
        found[row] = sums[0]
    return found


@pytest.mark.parametrize("num_shards", [1, 2, 5, 7, 13, 64])
def test_any_number_of_workers_comes_to_the_same_bits(num_shards: int) -> None:
    generator = torch.Generator().manual_seed(num_shards)
    scales = torch.logspace(-8, 8, num_shards, dtype=torch.float64)
    values = [torch.randn(3, generator=generator, dtype=torch.float64) * scale for scale in scales]
    alone = sum_shards((shard, (value.clone(),)) for shard, value in enumerate(values)).total()[0]
    for size in (1, 2, 3, 4, 5, 8, 64, 70):
        parts = shares(num_shards, size)
        most = max(len(node_places(part)) for part in parts)
        sent = tuple(packed(values, part, most) for part in parts)
        for rank in {0, size // 2, size - 1}:
            own = sum_shards((shard, (values[shard].clone(),)) for shard in parts[rank])
            (found,) = gather_sums(own, (values[0],), num_shards, Together(rank, size, num_shards, sent=sent))
            assert found.equal(alone), (size, rank)
    exact = torch.tensor([math.fsum(float(value[i]) for value in values) for i in range(3)], dtype=torch.float64)
    torch.testing.assert_close(alone, exact, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("num_rows", "num_shards", "count"), [(10, 64, 10), (640, 64, 64), (101, 7, 7), (0, 64, 0)])
def test_shards_are_all_rows_in_order_and_none_is_empty(num_rows: int, num_shards: int, count: int) -> None:
    rows = shard_rows(num_rows, num_shards)
    assert len(rows) == count
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop > part.start for part in rows)


@pytest.mark.parametrize("num_rows", [1, 63, 1000])
def test_sums_of_features_are_those_of_one_process_but_for_rounding(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(1))
    blocks = FeatureBlocks(features, torch.device("cpu"))
    seen: list[tuple[int, int]] = []

    def work(rows: slice, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((rows.start, rows.stop))
        assert block.equal(features[rows])
        return block.double().sum(dim=0), torch.tensor(len(block))

    alone = blocks.sum(work, columns=4, dtype=torch.float32)
    seen.clear()
    monkeypatch.setattr("bnncli.system.workers._team", [Team(0, 1, 64)])
    sharded = blocks.sum(work, columns=4, dtype=torch.float32)
    assert len(seen) == min(64, num_rows)
    torch.testing.assert_close(sharded[0], alone[0], rtol=0, atol=1e-12)
    assert int(sharded[1]) == num_rows


@pytest.mark.parametrize(("num_rows", "count"), [(0, 1), (1, 1), (512, 1), (513, 2), (10_000, 20), (60_000, 64)])
def test_rows_are_cut_alike_for_any_number_of_workers(num_rows: int, count: int) -> None:
    assert row_slices(num_rows, most=512, team=None) == [slice(0, num_rows)]
    one, *others = (row_slices(num_rows, most=512, team=Team(0, size)) for size in (1, 2, 3, 100))
    assert others == [one] * 3
    assert [row for part in one for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(one) == count
    sizes = [part.stop - part.start for part in one]
    assert max(sizes) - min(sizes) <= 1


LABEL_LAYOUTS = [HeadLayout(3, 2), HeadLayout(1, 2), HeadLayout(2, 2, has_bias=False)]


def many(layout: HeadLayout, num_sets: int = 3) -> ManyLabels:
    features = torch.randn(11, 2, generator=seeded(), dtype=torch.float64)
    sets = torch.randint(layout.num_classes, (num_sets, 11), generator=seeded(1))
    targets = [LastLayerTarget(features, labels, layout, Prior(0.7, 0.2)) for labels in sets]
    means = torch.randn(num_sets, layout.num_params, generator=seeded(2), dtype=torch.float64)
    roots = torch.randn(num_sets, layout.num_params, layout.num_params, generator=seeded(3), dtype=torch.float64).tril()
    return ManyLabels(targets, means, roots)


@pytest.mark.parametrize("layout", LABEL_LAYOUTS, ids=str)
def test_each_row_is_of_its_own_target(layout: HeadLayout) -> None:
    target = many(layout)
    z = torch.randn(6, layout.num_params, generator=seeded(4), dtype=torch.float64)
    value, gradient = target.log_joint_and_grad(z)
    torch.testing.assert_close(target.log_joint(z), value)
    for row in range(6):
        own = row % 3
        theta = target.means[own] + target.roots[own] @ z[row]
        torch.testing.assert_close(target.theta(z)[row], theta)
        joint, slope = target.targets[own].log_joint_and_grad(theta.unsqueeze(0))
        torch.testing.assert_close(value[row], joint[0])
        torch.testing.assert_close(gradient[row], slope[0] @ target.roots[own])


@pytest.mark.parametrize("layout", LABEL_LAYOUTS, ids=str)
def test_each_row_of_a_minibatch_is_of_its_own_targets(layout: HeadLayout) -> None:
    target, rows = many(layout), torch.tensor([7, 0, 3, 10])
    z = torch.randn(6, layout.num_params, generator=seeded(4), dtype=torch.float64)
    value, gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(z)
    for row in range(6):
        own = target.targets[row % 3]
        theta = target.theta(z)[row].unsqueeze(0)
        joint, slope = own.minibatch(*own.examples(rows)).log_joint_and_grad(theta)
        torch.testing.assert_close(value[row], joint[0])
        torch.testing.assert_close(gradient[row], slope[0] @ target.roots[row % 3])


def test_draws_are_told_apart_by_their_target() -> None:
    target = many(LABEL_LAYOUTS[0])
    z = torch.randn(6, 4, LABEL_LAYOUTS[0].num_params, generator=seeded(4), dtype=torch.float64)
    found = target.by_target(z)
    assert found.shape == (3, 8, LABEL_LAYOUTS[0].num_params)
    for own in range(3):  # rows own and own + 3, four draws each
        expected = torch.cat([z[own], z[own + 3]]) @ target.roots[own].T + target.means[own]
        torch.testing.assert_close(found[own], expected)


def test_targets_of_other_features_are_refused() -> None:
    one, other = many(LABEL_LAYOUTS[0]), many(LABEL_LAYOUTS[0])
    with pytest.raises(ValueError, match="share their features"):
        ManyLabels([*one.targets[:2], other.targets[2]], one.means, one.roots)
