"""Folds, and the search by them: the NLL of rows left out, by scipy's modes and Gauss-Hermite quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.heads import by_noisy_sign, head_target
from problems.seeds import normal, seeded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bnncli.inference.prior_variants import Fold, search_folds, stratified_folds
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior


def test_folds_have_even_sizes_and_even_shares_of_every_class() -> None:
    labels = torch.tensor([0] * 33 + [1] * 12 + [2] * 3)[torch.randperm(48, generator=seeded(1))]
    folds = stratified_folds(labels, 5, seeded(2))
    counts = torch.stack([torch.bincount(labels[folds == place], minlength=3) for place in range(5)])
    assert counts.sum(dim=0).tolist() == [33, 12, 3]
    assert (counts.max(dim=0).values - counts.min(dim=0).values).max() <= 1
    sizes = counts.sum(dim=1)
    assert sizes.max() - sizes.min() <= 1
    assert torch.equal(folds, stratified_folds(labels, 5, seeded(2)))
    assert not torch.equal(folds, stratified_folds(labels, 5, seeded(3)))


def test_folds_of_several_labels_have_even_sizes() -> None:
    folds = stratified_folds(torch.ones(23, 4, dtype=torch.uint8), 5, seeded())
    assert torch.bincount(folds).tolist() == [5, 5, 5, 4, 4]


def left_out_losses(
    fitted: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor], precision: float, mean: Tensor
) -> Tensor:
    """Losses of rows under the Laplace approximation to others: scipy's mode, autograd's Hessian, quadrature over the logit."""
    features, labels = fitted

    def loss(theta: Tensor) -> Tensor:
        nll = binary_cross_entropy_with_logits(features @ theta, labels.double(), reduction="sum")
        return nll + 0.5 * precision * (theta - mean).square().sum()

    def value_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(values, requires_grad=True)
        value = loss(theta)
        return value.item(), torch.autograd.grad(value, theta)[0].numpy()

    options = {"ftol": 0, "gtol": 1e-9}
    start = np.zeros(features.shape[1])
    mode = torch.from_numpy(
        scipy.optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x
    )
    covariance = torch.linalg.inv(torch.autograd.functional.hessian(loss, mode))
    x, y = judged
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(60))
    sd = ((x @ covariance) * x).sum(dim=1).sqrt()
    logits = (x @ mode)[:, None] + sd[:, None] * nodes
    signs = (2 * y - 1.0)[:, None]
    return -((signs * logits).sigmoid() @ (weights / weights.sum())).log()


@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_the_curve_is_the_nll_of_rows_that_their_fold_has_not_seen(scale: float) -> None:
    layout = HeadLayout(1, 4, has_bias=False)
    whole = head_target(layout, 40, labels=by_noisy_sign)
    folds = (torch.arange(40) // 4).clamp(max=4)  # of 4 rows, and one of 24
    means = [scale * (1 + place / 10) * normal(4, seed=3) for place in range(5)]  # each fold has its own

    def fold(place: int) -> Fold:
        rows = (folds == place).nonzero()[:, 0]
        prior = Prior(1.0) if scale == 0 else Prior(1.0).with_mean(means[place], scale)
        held_out = whole.held_out(whole.features[rows], whole.labels[rows])
        return Fold(whole.some((folds != place).nonzero()[:, 0]).with_prior(prior), held_out, len(rows))

    found = search_folds(
        [fold(place) for place in range(5)], start=torch.zeros(4), generator=seeded(4), structure="full"
    )
    for precision, value in found.curve:
        if precision < 0.5:
            continue  # draws of 256 err by more there
        losses = []
        for place in range(5):
            inside, outside = folds != place, folds == place
            losses.append(
                left_out_losses(
                    (whole.features[inside], whole.labels[inside]),
                    (whole.features[outside], whole.labels[outside]),
                    precision,
                    means[place],
                )
            )
        assert value == pytest.approx(float(torch.cat(losses).mean()), abs=0.01), precision
    assert found.best == min(found.curve, key=lambda point: point[1])[0]
    assert [fit.gaussian.require_prior().weight_precision for fit in found.fits] == pytest.approx([found.best] * 5)
    assert math.isfinite(found.best)
