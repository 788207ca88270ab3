"""Several labels an example: the likelihood against torch.distributions and autograd, its posteriors against one fit a label."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bnncli.inference.laplace import fit_gaussian
from bnncli.likelihoods import MULTILABEL, Multilabel, likelihood_of
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget

NUM_LABELS, NUM_EXAMPLES = 4, 30
LIKELIHOOD = Multilabel(NUM_LABELS)
LAYOUT = HeadLayout(NUM_LABELS, 3, likelihood_name=MULTILABEL)
PRIOR = Prior(0.7, 0.2)


def make_labels(num_examples: int = NUM_EXAMPLES) -> Tensor:
    """(n, L) of zero, one and several ones a row."""
    drawn = torch.rand(num_examples, NUM_LABELS, generator=torch.Generator().manual_seed(1))
    return (drawn < torch.tensor([0.1, 0.3, 0.5, 0.8])).to(torch.uint8)


def make_logits(scale: float = 3.0) -> Tensor:
    """(n, L)."""
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(NUM_EXAMPLES, NUM_LABELS, generator=generator, dtype=torch.float64)


def joint(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of all labels of each example, (n,), of torch."""
    return torch.distributions.Bernoulli(logits=logits).log_prob(labels.double()).sum(dim=-1)


def blocks(logits: Tensor) -> Tensor:
    """(L, 1, n), to be overwritten."""
    return logits.T.unsqueeze(1).clone()


def test_every_log_probability_is_that_of_independent_bernoullis() -> None:
    logits, labels = make_logits(), make_labels()
    exact = joint(logits, labels)
    for normalizers in (LIKELIHOOD.log_normalizers_(blocks(logits)), LIKELIHOOD.normalize_(blocks(logits))[0]):
        value = (logits.T * LIKELIHOOD.indicators(labels, torch.float64)).sum(dim=0) - normalizers[0]
        torch.testing.assert_close(value, exact)
    torch.testing.assert_close(LIKELIHOOD.sharp_log_likelihoods(blocks(logits), labels)[0], exact)
    torch.testing.assert_close(LIKELIHOOD.log_likelihoods(logits.expand(2, -1, -1), labels)[1], exact)
    torch.testing.assert_close(-NUM_LABELS * LIKELIHOOD.losses(logits, labels, 1.0), exact)
    every = torch.distributions.Bernoulli(logits=logits).log_prob(labels.double())
    torch.testing.assert_close(LIKELIHOOD.decision_logs(blocks(logits), labels)[:, 0], every.T)


def test_digits_are_kept_where_a_label_is_nearly_sure() -> None:
    logits, labels = torch.full((1, NUM_LABELS), 50.0, dtype=torch.float64), torch.ones(1, NUM_LABELS)
    exact = -NUM_LABELS * np.log1p(np.exp(-50.0))
    assert float(LIKELIHOOD.sharp_log_likelihoods(blocks(logits), labels)) == pytest.approx(exact, rel=1e-12)
    assert float(LIKELIHOOD.losses(logits, labels, 1.0)) == pytest.approx(-exact / NUM_LABELS, rel=1e-12)


def test_gradient_and_all_forms_of_the_hessian_are_those_of_autograd() -> None:
    logits, labels = make_logits(), make_labels()
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(joint(leaf, labels).sum(), leaf)
    p = LIKELIHOOD.normalize_(blocks(logits))[1]
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
    vectors = torch.randn(NUM_LABELS, 5, NUM_EXAMPLES, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
    expected = torch.einsum("nkl,lsn->ksn", exact, vectors)
    torch.testing.assert_close(LIKELIHOOD.hessian_product_(p, vectors.clone()), expected)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_derivatives_in_the_scale_are_those_of_autograd(scale: float) -> None:
    logits, labels = make_logits(), make_labels()
    leaf = torch.full((NUM_EXAMPLES, 1), scale, dtype=torch.float64, requires_grad=True)
    losses = -joint(leaf * logits, labels) / NUM_LABELS
    torch.testing.assert_close(LIKELIHOOD.losses(logits, labels, leaf.detach()), losses.detach())
    (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), leaf)
    found = LIKELIHOOD.loss_derivatives(logits, labels, scale)
    torch.testing.assert_close(found, (slope.detach()[:, 0], curvature[:, 0]), rtol=1e-9, atol=1e-12)


def test_probabilities_entropies_and_margins_are_told_of_each_label() -> None:
    logits, labels = make_logits(), make_labels()
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
