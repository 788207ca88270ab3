"""Stacking weights against a general optimiser, folds, and refitted heads against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from bnncli.inference.prior_variants import stratified_folds
from bnncli.inference.temperature import refit_head, stacking_weights
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT
from bnncli.targets.last_layer import LastLayerTarget


def log_scores(rows: int, members: int, seed: int = 0) -> Tensor:
    """Log probabilities (N, M) of labels, each member better on some rows."""
    return torch.log(torch.rand(rows, members, generator=seeded(seed), dtype=torch.float64) ** 3 + 1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 20.0])
@pytest.mark.parametrize(("rows", "members"), [(200, 2), (300, 5), (3, 4)])
def test_weights_are_those_of_a_general_optimiser(rows: int, members: int, smoothing: float) -> None:
    scores = log_scores(rows, members)
    shares = scores.exp().numpy()

    def loss(free: np.ndarray) -> float:
        weights = np.exp(free - free.max())
        weights /= weights.sum()
        return float(-np.log(shares @ weights).sum() - smoothing * np.log(weights + 1e-300).sum()) / rows

    found = min(
        (minimize(loss, start, method="BFGS", options={"gtol": 1e-9}) for start in np.eye(members)),
        key=lambda one: one.fun,
    )
    ours = stacking_weights(scores, smoothing=smoothing).numpy()
    assert ours.sum() == pytest.approx(1)
    assert loss(np.log(ours + 1e-300)) <= found.fun + 2e-6


def test_a_member_that_is_best_everywhere_has_the_weight_and_complementary_ones_share_it() -> None:
    best = torch.tensor([[-0.1, -1.0]]).repeat(500, 1)
    assert stacking_weights(best)[0] > 0.99
    halves = torch.cat([torch.tensor([[-0.1, -5.0]]).repeat(50, 1), torch.tensor([[-5.0, -0.1]]).repeat(50, 1)])
    np.testing.assert_allclose(stacking_weights(halves), [0.5, 0.5], atol=1e-3)
    assert torch.isfinite(stacking_weights(torch.tensor([[-2000.0, -1.0], [-1.0, -2000.0]]))).all()


def problem(rows: int = 300) -> tuple[Tensor, Tensor]:
    features = torch.randn(rows, 4, generator=seeded(), dtype=torch.float64)
    noise = torch.randn(rows, 3, generator=seeded(1), dtype=torch.float64)
    return features, (features[:, :3] * 1.5 + noise).argmax(dim=1)


def test_a_refitted_head_is_the_logistic_regression_whose_folds_predict_best() -> None:
    features, labels = problem()
    layout = HeadLayout(3, 4, has_bias=False)
    folds = stratified_folds(labels, 5, seeded(2))
    every = [torch.ones(300, dtype=torch.bool), *(folds != fold for fold in range(5))]
    targets = [LastLayerTarget(features[some], labels[some], layout, Prior(1.0)) for some in every]

    def fitted(rows: Tensor, precision: float) -> np.ndarray:
        model = LogisticRegression(C=1 / precision, fit_intercept=False, tol=1e-10, max_iter=5000)
        return np.asarray(model.fit(features[rows].numpy(), labels[rows].numpy()).coef_)

    def log_probs(theta: Tensor) -> Tensor:
        heads = theta.view(-1, 3, 4)[folds.long()]
        return torch.log_softmax(torch.einsum("nd,nkd->nk", features, heads), dim=1)[torch.arange(300), labels]

    found = refit_head("train", targets, log_probs, task=SILENT.task("", 0))
    assert found.precision is not None
    np.testing.assert_allclose(found.theta.view(3, 4), fitted(every[0], found.precision), atol=0.02)
    for fold in range(5):
        np.testing.assert_allclose(found.folds[fold].view(3, 4), fitted(every[1 + fold], found.precision), atol=0.02)

    def score(precision: float) -> float:
        heads = np.stack([fitted(every[1 + fold], precision).ravel() for fold in range(5)])
        return float(log_probs(torch.from_numpy(heads)).mean())

    tried = {precision: score(precision) for precision in 10.0 ** np.arange(-2, 5.5, 0.5)}
    assert tried[min(tried, key=lambda one: abs(np.log(one / found.precision)))] >= max(tried.values()) - 1e-4


def test_rows_that_no_fold_has_are_fitted_once() -> None:
    features, labels = problem()
    layout, seen = HeadLayout(3, 4, has_bias=False), []

    def log_probs(theta: Tensor) -> Tensor:
        seen.append(theta.shape)
        return torch.zeros(10)

    target = LastLayerTarget(features, labels, layout, Prior(1.0))
    found = refit_head("train", [target], log_probs, task=SILENT.task("", 0), precisions=[3.0])
    assert (found.precision, tuple(found.folds.shape)) == (3.0, (1, 12))
    assert set(seen) == {(1, 12)}
    torch.testing.assert_close(found.theta, found.folds[0])
