"""Likelihoods against mpmath and torch.distributions: values, derivatives, classes, at any size of logits."""

from __future__ import annotations

from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian

from bnncli.likelihoods import Categorical, likelihood_of, outputs_for

OUTPUTS = (1, 2, 10)
LARGEST = 1e4
NUM_EXAMPLES = 30
SOFTPLUS = 3e-9  # torch's softplus(x) is x from 20 on: it leaves out e^-20

every_size = pytest.mark.parametrize("num_outputs", OUTPUTS)
every_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def make_logits(num_outputs: int, dtype: torch.dtype = torch.float64, *, scale: float = 3.0) -> Tensor:
    """Logits (n, K)."""
    generator = torch.Generator().manual_seed(num_outputs)
    return scale * torch.randn(NUM_EXAMPLES, num_outputs, generator=generator, dtype=torch.float64).to(dtype)


def extreme_logits(num_outputs: int, dtype: torch.dtype) -> Tensor:
    """Logits (n, K) of every size up to LARGEST, ends and zeros among them."""
    logits = make_logits(num_outputs, dtype, scale=1.0) * torch.logspace(-3, 4, NUM_EXAMPLES, dtype=dtype)[:, None]
    logits[0], logits[1], logits[2] = LARGEST, -LARGEST, 0
    logits[3, 0], logits[4, 0] = LARGEST, -LARGEST
    return logits.clamp(-LARGEST, LARGEST)


def make_labels(num_outputs: int) -> Tensor:
    """Labels (n,), every class among them."""
    return torch.arange(NUM_EXAMPLES) % max(2, num_outputs)


def blocks(logits: Tensor) -> Tensor:
    """Logits (n, K) as a block (K, 1, n) that may be overwritten."""
    return logits.T.unsqueeze(1).clone()


def distribution(logits: Tensor) -> Any:
    """The distribution of the label given logits (..., K), of torch."""
    if logits.shape[-1] == 1:
        return torch.distributions.Bernoulli(logits=logits[..., 0])
    return torch.distributions.Categorical(logits=logits)


def _exact_log(row: list[float], label: int) -> Any:
    others = (mpmath.exp(logit - row[label]) for k, logit in enumerate(row) if k != label)
    return -mpmath.log1p(mpmath.fsum(others))


def exact_logs(logits: Tensor) -> Tensor:
    """log p of every class, (n, C) float64, with 40 digits on the way: -log(1 + sum of what speaks against it)."""
    rows = [[0.0, *row] if len(row) == 1 else row for row in logits.double().tolist()]
    with mpmath.workdps(40):
        exact = [[_exact_log(row, k) for k in range(len(row))] for row in rows]
    return torch.tensor([[float(value) for value in row] for row in exact], dtype=torch.float64)


def of_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Those (n,) of the labels (n,), of values (n, C)."""
    return values.gather(1, labels[:, None])[:, 0]


def near(found: Tensor, exact: Tensor, *, relative: float, absolute: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=absolute)


@every_size
@every_precision
def test_the_label_term_less_the_normalizer_is_the_log_probability(num_outputs: int, dtype: torch.dtype) -> None:
    likelihood, labels = likelihood_of(num_outputs), make_labels(num_outputs)
    logits, precision = extreme_logits(num_outputs, dtype), torch.finfo(dtype).eps
    label_term = (logits.T * likelihood.indicators(labels, dtype)).sum(dim=0)
    exact = of_labels(exact_logs(logits), labels)
    for normalizers in (likelihood.log_normalizers_(blocks(logits)), likelihood.normalize_(blocks(logits))[0]):
        # Of two numbers as large as the logits.
        near(label_term - normalizers[0], exact, relative=4 * precision, absolute=4 * precision * LARGEST + SOFTPLUS)


@every_size
@every_precision
def test_probabilities_are_right_at_any_size_of_logits(num_outputs: int, dtype: torch.dtype) -> None:
    likelihood, logits, precision = (
        likelihood_of(num_outputs),
        extreme_logits(num_outputs, dtype),
        torch.finfo(dtype).eps,
    )
    exact = exact_logs(logits).exp()
    of_outputs = likelihood.normalize_(blocks(logits))[1][:, 0].T
    tiny = torch.finfo(dtype).tiny
    near(of_outputs, exact[:, -num_outputs:], relative=2e3 * precision, absolute=tiny)
    near(likelihood.class_probabilities(logits, dim=1), exact, relative=2e3 * precision, absolute=tiny)


@every_size
@every_precision
def test_sharp_log_probabilities_keep_their_digits_near_one(num_outputs: int, dtype: torch.dtype) -> None:
    likelihood, labels = likelihood_of(num_outputs), make_labels(num_outputs)
    logits, precision = extreme_logits(num_outputs, dtype), torch.finfo(dtype).eps
    found = likelihood.sharp_log_likelihoods(blocks(logits), labels)[0]
    exact = of_labels(exact_logs(logits), labels)
    rounding = 8 * precision * logits.abs().amax(dim=1).clamp_min(1).double()  # of the logits' differences
    allowed = rounding * exact.abs() + SOFTPLUS * (exact < -20) + torch.finfo(dtype).tiny
    assert bool(((found.double() - exact).abs() <= allowed).all())


@every_size
@every_precision
def test_log_probabilities_of_labels_and_classes_agree_with_mpmath(num_outputs: int, dtype: torch.dtype) -> None:
    likelihood, labels = likelihood_of(num_outputs), make_labels(num_outputs)
    logits, precision = extreme_logits(num_outputs, dtype), torch.finfo(dtype).eps
    every = exact_logs(logits)
    exact = of_labels(every, labels)
    close = {"relative": 4 * precision, "absolute": 4 * precision * LARGEST + SOFTPLUS}
    near(likelihood.log_likelihoods(logits.expand(2, -1, -1), labels)[1], exact, **close)
    near(-likelihood.losses(logits, labels, 1.0), exact, relative=1e-14, absolute=1e-15)
    near(likelihood.log_class_probabilities(logits, dim=1), every, **close)


@every_size
def test_the_gradient_is_indicators_less_probabilities(num_outputs: int) -> None:
    likelihood, labels = likelihood_of(num_outputs), make_labels(num_outputs)
    leaf = make_logits(num_outputs).requires_grad_()
    (expected,) = torch.autograd.grad(distribution(leaf).log_prob(labels.double()).sum(), leaf)
    probabilities = likelihood.normalize_(blocks(leaf.detach()))[1][:, 0]
    torch.testing.assert_close(likelihood.indicators(labels, torch.float64) - probabilities, expected.T)
    (through,) = torch.autograd.grad(likelihood.log_likelihoods(leaf.unsqueeze(0), labels).sum(), leaf)
    torch.testing.assert_close(through, expected)


def exact_hessians(logits: Tensor, labels: Tensor) -> Tensor:
    """Of -log p with respect to the logits, (n, K, K), by autograd."""
    pairs = zip(logits, labels.double(), strict=True)
    return torch.stack([hessian(lambda f, y=y: -distribution(f).log_prob(y), row) for row, y in pairs])


@every_size
def test_all_forms_of_the_hessian_are_that_of_autograd(num_outputs: int) -> None:
    likelihood, labels, logits = likelihood_of(num_outputs), make_labels(num_outputs), make_logits(num_outputs)
    exact = exact_hessians(logits, labels)
    p = likelihood.normalize_(blocks(logits))[1]
    torch.testing.assert_close(likelihood.hessian_diagonal(p[:, 0]), exact.diagonal(dim1=1, dim2=2).T)
    torch.testing.assert_close(likelihood.hessian_sum(p[:, 0]), exact.sum(dim=0))
    vectors = torch.randn(num_outputs, 4, NUM_EXAMPLES, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
    product = torch.einsum("nkl,lsn->ksn", exact, vectors)
    torch.testing.assert_close(likelihood.hessian_product_(p, vectors.clone()), product)
    root = likelihood.hessian_root(p[:, 0])
    torch.testing.assert_close(torch.einsum("kmn,lmn->nkl", root, root), exact)


@every_size
def test_the_pairs_are_all_of_the_hessian(num_outputs: int) -> None:
    likelihood, logits = likelihood_of(num_outputs), make_logits(num_outputs)
    exact = exact_hessians(logits, make_labels(num_outputs))
    pairs = likelihood.hessian_pairs(likelihood.normalize_(blocks(logits))[1][:, 0])
    assert pairs.shape == (likelihood.num_pairs, NUM_EXAMPLES)
    rows, columns = torch.triu_indices(num_outputs, num_outputs, int(likelihood.is_shift_invariant))
    sign = -1 if likelihood.is_shift_invariant else 1
    torch.testing.assert_close(sign * pairs, exact[:, rows, columns].T)
    assert likelihood.is_shift_invariant == bool(exact.sum(dim=2).abs().max() < 1e-12)


@every_size
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_classes_are_told_along_any_axis(num_outputs: int, dim: int) -> None:
    likelihood, logits = likelihood_of(num_outputs), make_logits(num_outputs).reshape(5, 6, num_outputs)
    expected = distribution(logits).probs
    expected = torch.stack([1 - expected, expected], dim=2) if num_outputs == 1 else expected
    moved, expected = logits.movedim(2, dim), expected.movedim(2, dim)
    assert expected.shape[dim] == likelihood.num_classes
    torch.testing.assert_close(likelihood.class_probabilities(moved, dim=dim), expected)
    torch.testing.assert_close(likelihood.log_class_probabilities(moved, dim=dim), expected.log())
    for classes in (likelihood.class_logits(moved, dim=dim), likelihood.balanced_class_logits(moved, dim=dim)):
        torch.testing.assert_close(classes.softmax(dim=dim), expected)


def test_balanced_logits_of_two_classes_do_not_change_when_the_labels_are_swapped() -> None:
    logits, likelihood = make_logits(1), likelihood_of(1)
    swapped = likelihood.balanced_class_logits(-logits, dim=1)
    assert torch.equal(likelihood.balanced_class_logits(logits, dim=1).flip(1), swapped)


@every_size
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_derivatives_in_the_scale_are_those_of_autograd(num_outputs: int, scale: float) -> None:
    likelihood, labels, logits = likelihood_of(num_outputs), make_labels(num_outputs), make_logits(num_outputs)
    leaf = torch.full((NUM_EXAMPLES, 1), scale, dtype=torch.float64, requires_grad=True)
    losses = -distribution(leaf * logits).log_prob(labels.double())
    torch.testing.assert_close(likelihood.losses(logits, labels, leaf.detach()), losses.detach())
    (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), leaf)
    found = likelihood.loss_derivatives(logits, labels, scale)
    torch.testing.assert_close(found, (slope.detach()[:, 0], curvature[:, 0]), rtol=1e-9, atol=1e-12)


@every_size
def test_margins_say_which_class_is_above_the_label(num_outputs: int) -> None:
    likelihood, labels, logits = likelihood_of(num_outputs), make_labels(num_outputs), make_logits(num_outputs)
    margins = likelihood.margins(logits.float(), labels)
    logs = likelihood.log_class_probabilities(logits.float().double(), dim=1)
    torch.testing.assert_close(margins, logs - logs.gather(1, labels[:, None]), rtol=1e-12, atol=1e-12)


def test_a_single_logit_is_the_difference_of_two() -> None:
    logits, labels = make_logits(1), make_labels(1)
    two = likelihood_of(1).class_logits(logits, dim=1)
    one, other = likelihood_of(1), likelihood_of(2)
    for scale in (0.5, 2.0):
        torch.testing.assert_close(one.losses(logits, labels, scale), other.losses(two, labels, scale))
    torch.testing.assert_close(
        one.sharp_log_likelihoods(blocks(logits), labels), other.sharp_log_likelihoods(blocks(two), labels)
    )


def test_one_logit_tells_two_classes_apart_and_more_tell_one_each() -> None:
    assert [likelihood_of(size).num_classes for size in (1, 2, 3, 10)] == [2, 2, 3, 10]
    assert [outputs_for(size) for size in (2, 3, 10)] == [1, 3, 10]
    assert [likelihood_of(size).num_outputs for size in (1, 2, 10)] == [1, 2, 10]
    assert likelihood_of(1).output_names(["cat", "dog"]) == ["logit"]
    assert likelihood_of(2).output_names(["cat", "dog"]) == ["cat", "dog"]
    with pytest.raises(ValueError, match="at least two outputs, got 1"):
        Categorical(1)
