"""Estimate the density ratio between two splits' features by a classifier that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.lazy import np
from bnncli.numerics.random import stream_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_WEIGHT = 20.0  # of one example, where the mean is one
MOST_ROWS = 20_000  # of the other split; more only cost time
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # inverse L2 penalties on standardised features
NUM_FOLDS = 5


@dataclass(frozen=True)
class DensityRatio:
    """Density of the other features relative to the own ones at each example.

    Attributes:
        weights: (N,), ratios at the own examples, clipped at MOST_WEIGHT times their mean.
        bound: largest clipped ratio at any example of both splits.
        auroc: how well the classifier tells the splits apart, out of fold; 0.5 without shift.
    """

    weights: NDArray[np.float64]
    bound: float
    auroc: float

    @property
    def effective_size(self) -> float:
        """Return the number of equally weighted examples that are worth as much."""
        return effective_size(self.weights)


def effective_size(weights: NDArray[np.float64]) -> float:
    """Return (sum of weights)^2 / (sum of squared weights), after Kish."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def estimate_ratio(own: NDArray, other: NDArray, *, seed: int) -> DensityRatio:
    """Estimate the ratio from features own (N, D) and other (M, D), by logistic regression with cross-validation.

    The log ratio is linear in the standardised features and in their squared norm, which reacts to a change of scale.
    Each example's ratio comes from a model that was fitted without it. The penalty is the one of PENALTIES with the
    lowest NLL out of fold.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss, roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.preprocessing import scale

    generator = np.random.default_rng(stream_seed(seed, "sets/shift"))
    if len(other) > MOST_ROWS:
        other = other[np.sort(generator.choice(len(other), MOST_ROWS, replace=False))]
    standardised = scale(np.concatenate([own, other]).astype(np.float64))
    features = np.column_stack([standardised, scale((standardised**2).sum(axis=1))])
    is_other = np.arange(len(features)) >= len(own)
    folds = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=int(generator.integers(1 << 31)))
    tried = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=1000)
        probs = cross_val_predict(model, features, is_other, cv=folds, method="predict_proba")[:, 1]
        tried.append((float(log_loss(is_other, probs)), penalty, probs))
    probs = np.clip(min(tried, key=lambda one: one[:2])[2], 1e-12, 1 - 1e-12)
    ratios = probs / (1 - probs) * len(own) / len(other)
    most = MOST_WEIGHT * float(ratios[: len(own)].mean())
    clipped = np.minimum(ratios, most)
    return DensityRatio(clipped[: len(own)], float(clipped.max()), float(roc_auc_score(is_other, probs)))
