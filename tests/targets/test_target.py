"""The last-layer log posterior against the textbook formula under autograd."""

import math
from functools import partial

import pytest
import torch
from problems.heads import LAYOUTS, draw_theta, every_layout, head_target
from problems.oracles import negative_log_likelihood
from torch import Tensor

from bnncli.errors import DataError
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets import blocks as stream
from bnncli.targets import last_layer
from bnncli.targets.last_layer import LastLayerTarget

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
        assert bias is not None
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
    target, theta = make_target(layout), draw_theta(layout, 5)
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


def test_a_common_shift_of_all_biases_changes_only_the_prior() -> None:
    target, theta = make_target(LAYOUTS[0]), draw_theta(LAYOUTS[0], 5)
    shifted = theta.clone()
    shifted[:, -3:] += 2.0
    torch.testing.assert_close(target.log_likelihood(shifted), target.log_likelihood(theta))
    assert (target.log_prior(shifted) - target.log_prior(theta)).abs().min() > 0.1


def test_one_bias_changes_the_likelihood() -> None:
    target, theta = make_target(LAYOUTS[0]), draw_theta(LAYOUTS[0], 5)
    shifted = theta.clone()
    shifted[:, -1] += 2.0
    assert (target.log_likelihood(shifted) - target.log_likelihood(theta)).abs().min() > 0.01


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


def test_with_prior_precision_changes_the_prior_alone() -> None:
    target, theta = make_target(LAYOUTS[0]), draw_theta(LAYOUTS[0], 5)
    other = target.with_prior(Prior(9.0))
    expected = torch.distributions.Normal(0.0, 1 / 3).log_prob(theta).sum(dim=1)
    torch.testing.assert_close(other.log_prior(theta), expected)
    torch.testing.assert_close(other.log_likelihood(theta), target.log_likelihood(theta))


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


def test_theta_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="theta: expected shape"):
        make_target(LAYOUTS[0]).log_joint(torch.zeros(2, 7))
