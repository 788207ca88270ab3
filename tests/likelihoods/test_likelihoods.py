"""Likelihoods of classes, of several labels, and of one's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.nn.functional import one_hot, softplus

from bnncli import registry
from bnncli.inference.laplace import fit_gaussian
from bnncli.likelihoods import MULTILABEL, Categorical, Multilabel, likelihood_of, outputs_for
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget

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


NUM_LABELS, NUM_LABELLED = 4, 30
LIKELIHOOD = Multilabel(NUM_LABELS)
LAYOUT = HeadLayout(NUM_LABELS, 3, likelihood_name=MULTILABEL)
PRIOR = Prior(0.7, 0.2)


def make_label_sets(num_examples: int = NUM_LABELLED) -> Tensor:
    """(n, L) of zero, one and several ones a row."""
    drawn = torch.rand(num_examples, NUM_LABELS, generator=torch.Generator().manual_seed(1))
    return (drawn < torch.tensor([0.1, 0.3, 0.5, 0.8])).to(torch.uint8)


def make_label_logits(scale: float = 3.0) -> Tensor:
    """(n, L)."""
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(NUM_LABELLED, NUM_LABELS, generator=generator, dtype=torch.float64)


def joint(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of all labels of each example, (n,), of torch."""
    return torch.distributions.Bernoulli(logits=logits).log_prob(labels.double()).sum(dim=-1)


def label_blocks(logits: Tensor) -> Tensor:
    """(L, 1, n), to be overwritten."""
    return logits.T.unsqueeze(1).clone()


def test_every_log_probability_is_that_of_independent_bernoullis() -> None:
    logits, labels = make_label_logits(), make_label_sets()
    exact = joint(logits, labels)
    for normalizers in (
        LIKELIHOOD.log_normalizers_(label_blocks(logits)),
        LIKELIHOOD.normalize_(label_blocks(logits))[0],
    ):
        value = (logits.T * LIKELIHOOD.indicators(labels, torch.float64)).sum(dim=0) - normalizers[0]
        torch.testing.assert_close(value, exact)
    torch.testing.assert_close(LIKELIHOOD.sharp_log_likelihoods(label_blocks(logits), labels)[0], exact)
    torch.testing.assert_close(LIKELIHOOD.log_likelihoods(logits.expand(2, -1, -1), labels)[1], exact)
    torch.testing.assert_close(-NUM_LABELS * LIKELIHOOD.losses(logits, labels, 1.0), exact)
    every = torch.distributions.Bernoulli(logits=logits).log_prob(labels.double())
    torch.testing.assert_close(LIKELIHOOD.decision_logs(label_blocks(logits), labels)[:, 0], every.T)


def test_digits_are_kept_where_a_label_is_nearly_sure() -> None:
    logits, labels = torch.full((1, NUM_LABELS), 50.0, dtype=torch.float64), torch.ones(1, NUM_LABELS)
    exact = -NUM_LABELS * np.log1p(np.exp(-50.0))
    assert float(LIKELIHOOD.sharp_log_likelihoods(label_blocks(logits), labels)) == pytest.approx(exact, rel=1e-12)
    assert float(LIKELIHOOD.losses(logits, labels, 1.0)) == pytest.approx(-exact / NUM_LABELS, rel=1e-12)


def test_gradient_and_all_forms_of_the_hessian_are_those_of_autograd() -> None:
    logits, labels = make_label_logits(), make_label_sets()
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(joint(leaf, labels).sum(), leaf)
    p = LIKELIHOOD.normalize_(label_blocks(logits))[1]
    found = LIKELIHOOD.indicators(labels, torch.float64) - p[:, 0]
    torch.testing.assert_close(found, gradient.T, rtol=1e-6, atol=1e-9)
    exact = torch.stack(
        [
            torch.autograd.functional.hessian(lambda f, y=y: -joint(f, y), row)
            for row, y in zip(logits, labels, strict=True)
        ]
    )
    torch.testing.assert_close(LIKELIHOOD.hessian_diagonal(p[:, 0]), exact.diagonal(dim1=1, dim2=2).T)
    torch.testing.assert_close(LIKELIHOOD.hessian_pairs(p[:, 0]), exact.diagonal(dim1=1, dim2=2).T)
    root = LIKELIHOOD.hessian_root(p[:, 0])
    torch.testing.assert_close(torch.einsum("kmn,lmn->nkl", root, root), exact)
    torch.testing.assert_close(LIKELIHOOD.hessian_sum(p[:, 0]), exact.sum(dim=0))
    vectors = torch.randn(NUM_LABELS, 5, NUM_LABELLED, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
    expected = torch.einsum("nkl,lsn->ksn", exact, vectors)
    torch.testing.assert_close(LIKELIHOOD.hessian_product_(p, vectors.clone()), expected)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_derivatives_of_labels_in_the_scale_are_those_of_autograd(scale: float) -> None:
    logits, labels = make_label_logits(), make_label_sets()
    leaf = torch.full((NUM_LABELLED, 1), scale, dtype=torch.float64, requires_grad=True)
    losses = -joint(leaf * logits, labels) / NUM_LABELS
    torch.testing.assert_close(LIKELIHOOD.losses(logits, labels, leaf.detach()), losses.detach())
    (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), leaf)
    found = LIKELIHOOD.loss_derivatives(logits, labels, scale)
    torch.testing.assert_close(found, (slope.detach()[:, 0], curvature[:, 0]), rtol=1e-9, atol=1e-12)


def test_probabilities_entropies_and_margins_are_told_of_each_label() -> None:
    logits, labels = make_label_logits(), make_label_sets()
    distribution = torch.distributions.Bernoulli(logits=logits)
    torch.testing.assert_close(LIKELIHOOD.class_probabilities(logits, dim=1), distribution.probs)
    torch.testing.assert_close(LIKELIHOOD.log_class_probabilities(logits, dim=1), distribution.probs.log())
    probs, terms = LIKELIHOOD.entropy_terms(logits, dim=1)
    torch.testing.assert_close(probs, distribution.probs)
    torch.testing.assert_close(-terms, distribution.entropy())
    torch.testing.assert_close(LIKELIHOOD.log_partitions(logits), logits.exp().log1p().sum(dim=1))
    margins = LIKELIHOOD.margins(logits, labels)
    assert bool(((margins < 0) == ((logits > 0) == (labels == 1))).all())
    assert torch.equal(margins.abs(), logits.abs())


def test_the_likelihood_is_recorded_by_name_and_only_where_the_number_of_outputs_does_not_say_it() -> None:
    plain = HeadLayout(NUM_LABELS, 3)
    assert "likelihood" not in plain.to_meta()
    assert "likelihood" not in NetworkLayout((3, 4)).to_meta()
    for layout in (LAYOUT, NetworkLayout((3, 5, 4), likelihood_name=MULTILABEL)):
        assert layout.to_meta()["likelihood"] == "multilabel"
        assert type(layout).from_meta(layout.to_meta()) == layout
        assert layout.likelihood is likelihood_of(4, MULTILABEL)
    assert plain != LAYOUT
    assert not LAYOUT.can_replace(plain)
    assert "multilabel" in str(LAYOUT)
    with pytest.raises(ValueError, match="likelihood 'multilabel' or none by name, got 'poisson'"):
        HeadLayout.from_meta({**plain.to_meta(), "likelihood": "poisson"})
    with pytest.raises(ValueError, match="at least two outputs, got 1"):
        HeadLayout(1, 3, likelihood_name=MULTILABEL)


def make_target(prior: Prior = PRIOR, num_examples: int = 200) -> LastLayerTarget:
    """Of features (N, 3) and labels that depend on them."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(num_examples, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(NUM_LABELS, 3, generator=generator, dtype=torch.float64)
    shift = torch.tensor([-2.0, -0.5, 0.0, 1.0], dtype=torch.float64)
    drawn = torch.rand(num_examples, NUM_LABELS, generator=generator, dtype=torch.float64)
    labels = (drawn < torch.sigmoid(features @ weight.T + shift)).to(torch.uint8)
    return LastLayerTarget(features, labels, LAYOUT, prior)


def label_targets(target: LastLayerTarget) -> list[LastLayerTarget]:
    """A target of two classes for each label by itself."""
    layout = HeadLayout(1, target.layout.num_features)
    return [LastLayerTarget(target.features, one.long(), layout, target.prior) for one in target.labels.T]


def test_value_gradient_and_products_of_a_target_are_the_sums_over_the_labels() -> None:
    target = make_target()
    theta = torch.randn(3, LAYOUT.num_params, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parts = LAYOUT.augment(theta)
    value, gradient = target.log_joint_and_grad(theta)
    own = [one.log_joint_and_grad(parts[:, k]) for k, one in enumerate(label_targets(target))]
    torch.testing.assert_close(value, sum(pair[0] for pair in own))
    torch.testing.assert_close(LAYOUT.augment(gradient), torch.stack([pair[1] for pair in own], dim=1))
    torch.testing.assert_close(target.log_joint(theta), value)
    every = torch.arange(target.num_examples)
    torch.testing.assert_close(target.minibatch(*target.examples(every)).log_joint_and_grad(theta)[0], value)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_a_gaussian_is_that_of_each_label_by_itself(structure: str) -> None:
    target = make_target()
    whole = fit_gaussian(target, structure=structure, start=torch.zeros(LAYOUT.num_params)).gaussian
    draws = torch.eye(LAYOUT.num_params, dtype=torch.float64)
    covariance = whole.covariance.unwhiten(draws).T @ whole.covariance.unwhiten(draws)
    places = LAYOUT.places(torch.device("cpu"))
    for k, one in enumerate(label_targets(target)):
        alone = fit_gaussian(one, structure=structure, start=torch.zeros(one.layout.num_params)).gaussian
        root = alone.covariance.unwhiten(torch.eye(one.layout.num_params, dtype=torch.float64))
        torch.testing.assert_close(whole.mean[places[k]], alone.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(covariance[places[k]][:, places[k]], root.T @ root, rtol=1e-4, atol=1e-6)
        others = [other for other in range(NUM_LABELS) if other != k]
        assert covariance[places[k]][:, places[others].flatten()].abs().max() < 1e-12


def test_the_evidence_is_the_sum_over_the_labels() -> None:
    target = make_target()
    whole = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).log_marginal_likelihood
    alone = [fit_gaussian(one, start=torch.zeros(4)).log_marginal_likelihood for one in label_targets(target)]
    assert whole == pytest.approx(sum(part for part in alone if part is not None), abs=1e-3)


def test_the_mode_is_that_of_one_logistic_regression_of_scikit_learn_a_label() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    target = make_target(Prior(0.7))  # of all parameters: scikit-learn leaves the intercept out, so ones are a feature
    mode = LAYOUT.augment(fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).gaussian.mean)
    ones = np.concatenate([target.features.numpy(), np.ones((target.num_examples, 1))], axis=1)
    for k in range(NUM_LABELS):
        model = linear.LogisticRegression(C=1 / 0.7, fit_intercept=False, tol=1e-10, max_iter=1000)
        model.fit(ones, target.labels[:, k].numpy())
        np.testing.assert_allclose(mode[k].numpy(), model.coef_[0], atol=2e-3)


def test_held_out_losses_are_means_over_the_labels_of_the_predictive_of_each() -> None:
    target, theta = make_target(), torch.randn(7, LAYOUT.num_params, generator=torch.Generator().manual_seed(5))
    found = target.held_out(target.features[:20], target.labels[:20]).losses(theta)
    probs = torch.sigmoid(LAYOUT.logits(target.features[:20], theta.double())).mean(dim=0)
    labels = target.labels[:20].double()
    expected = -(labels * probs.log() + (1 - labels) * (1 - probs).log()).mean(dim=1)
    torch.testing.assert_close(found, expected)
    assert isinstance(target.held_out(target.features, target.labels), HeldOutFeatures)


def test_labels_of_another_kind_are_refused() -> None:
    target = make_target()
    with pytest.raises(ValueError, match="labels"):
        replace(target, labels=target.labels[:, 0].long())
    with pytest.raises(Exception, match=r"expected labels from 0 to 1, got 0 to 2"):
        replace(target, labels=2 * target.labels)


class OneAgainstTheRest(Categorical):
    """Each of K outputs is the logit of its class against all others: log p = sum_k (indicator_k f_k - softplus(f_k))."""

    is_shift_invariant: ClassVar[bool] = False

    @property
    def num_pairs(self) -> int:
        return self.num_outputs

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        return softplus(logits).sum(dim=0)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_normalizers_(logits), torch.sigmoid(logits)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        return self.hessian_diagonal(probabilities).sum(dim=1).double().diag()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        return self.hessian_diagonal(probabilities)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        return vectors.mul_(self.hessian_diagonal(probabilities))


@dataclass(frozen=True)
class Layout(HeadLayout):
    """A head whose outputs are judged that way."""

    @property
    def likelihood(self) -> OneAgainstTheRest:
        return OneAgainstTheRest(self.num_outputs)


OWN_LAYOUT = Layout(3, 4)


def own_target() -> LastLayerTarget:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    return LastLayerTarget(features, torch.randint(3, (60,), generator=generator), OWN_LAYOUT, Prior(2.0))


def naive_log_joint(target: LastLayerTarget, theta: Tensor) -> Tensor:
    weight, bias = OWN_LAYOUT.split(theta)
    distribution = torch.distributions.Bernoulli(logits=target.features @ weight.T + bias)
    value = distribution.log_prob(one_hot(target.labels, 3).double()).sum()
    return value + torch.distributions.Normal(torch.zeros_like(theta), 2.0**-0.5).log_prob(theta).sum()


def test_value_and_gradient_are_those_of_the_likelihood_that_the_layout_carries() -> None:
    target, theta = (
        own_target(),
        torch.randn(5, 15, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )
    leaf = theta.clone().requires_grad_()
    values = torch.stack([naive_log_joint(target, one) for one in leaf])
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    torch.testing.assert_close(target.log_joint_and_grad(theta), (values.detach(), gradient))
    torch.testing.assert_close(target.log_joint(theta), values.detach())
    every = torch.arange(60)
    torch.testing.assert_close(target.minibatch(*target.examples(every)).log_joint_and_grad(theta)[0], values.detach())


def test_the_gaussian_at_the_mode_has_the_curvature_of_independent_outputs() -> None:
    target = own_target()
    fit = fit_gaussian(target, start=torch.zeros(15, dtype=torch.float64))
    mode = fit.gaussian.mean
    hessian = torch.autograd.functional.hessian(lambda theta: -naive_log_joint(target, theta), mode)
    assert target.log_joint_and_grad(mode[None])[1].abs().max() < 1e-3
    covariance = fit.gaussian.covariance.unwhiten(torch.eye(15, dtype=torch.float64))
    torch.testing.assert_close(covariance.T @ covariance, torch.linalg.inv(hessian), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        target.hessian_vector_product(mode, torch.eye(15)), hessian, rtol=1e-6, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("structure", ["block", "diag"])
def test_what_independent_outputs_have_no_part_in_is_not_missed(structure: str) -> None:
    target, theta = own_target(), torch.randn(15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = registry.load_class("curvature", "full").hessian(target, theta)["hessian.full"]
    (part,) = registry.load_class("curvature", structure).hessian(target, theta).values()
    places = OWN_LAYOUT.places(whole.device)
    blocks = torch.stack([whole[place][:, place] for place in places])
    expected = blocks if structure == "block" else OWN_LAYOUT.flatten(blocks.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(part, expected)
    assert whole[places[0]][:, places[1]].abs().max() == 0
