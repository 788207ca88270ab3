"""Decompose two-class scores into miscalibration - discrimination + uncertainty, without bins.

The CORP approach of Dimitriadis, Gneiting and Jordan (2021), arXiv 2008.03033, eq. (3) to (5): the recalibrated
forecast is the isotonic regression of the labels on the probability of class 1.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup, brier_losses, log_losses
from bnncli.lazy import special

_COST = 4.0  # relative to a mean, measured


def decomposition_scores(examples: ExampleStatistics) -> ScoreGroup:
    """Return miscalibration, discrimination and uncertainty of the Brier score and of the NLL (nats).

    The score is miscalibration - discrimination + uncertainty.
    """
    members = [
        ScoreForm(name, {"of": of, "method": "CORP"}, higher, method=method)
        for of in ("brier", "nll")
        for name, higher, method in (
            ("miscalibration", False, "basic"),
            ("discrimination", True, "basic"),
            ("uncertainty", None, "percentile"),
        )
    ]
    if examples.num_classes != 2:
        return ScoreGroup(members, None, f"expected two classes, got {examples.num_classes}")
    if examples.labels is None or examples.label_probability is None:
        return ScoreGroup(members, None, NO_LABELS)
    # Not from the label's probability: 1 - p rounds, so equal forecasts would differ by label.
    forecast = np.where(examples.predicted == 1, examples.confidence, 1 - examples.confidence)
    order = np.argsort(forecast, kind="stable")
    _, starts = np.unique(forecast[order], return_index=True)
    is_one = examples.labels[order] == 1
    losses = np.stack([brier_losses(examples), log_losses(examples.label_probability)], axis=1)

    def statistic(weights: NDArray) -> Floats:
        weights = weights.astype(np.float64)
        sorted_weights = weights[:, order]
        count = np.add.reduceat(sorted_weights, starts, axis=1)
        ones = np.add.reduceat(sorted_weights * is_one, starts, axis=1)
        recalibrated = np.stack([_recalibrated_losses(*row) for row in zip(count, ones, strict=True)])
        score, uncertainty = weights @ losses / len(order), _uncertainty(ones.sum(axis=1) / len(order))
        parts = [score - recalibrated, uncertainty - recalibrated, uncertainty]
        return np.maximum(0.0, np.stack(parts, axis=2)).reshape(len(weights), -1)

    return ScoreGroup(members, statistic, cost=_COST)


def _recalibrated_losses(count: Floats, ones: Floats) -> Floats:
    """Return Brier score (summed over both classes) and NLL (2,) of the isotonic regression of labels grouped by forecast."""
    from sklearn.isotonic import isotonic_regression  # slow to import

    is_there = count > 0
    count, ones = count[is_there], ones[is_there]
    fitted = cast(Floats, isotonic_regression(ones / count, sample_weight=count, y_min=0.0, y_max=1.0))
    zeros = count - ones
    brier = 2 * np.sum(ones * (1 - fitted) ** 2 + zeros * fitted**2)
    log_loss = -np.sum(special.xlogy(ones, fitted) + special.xlogy(zeros, 1 - fitted))
    return np.array([brier, log_loss]) / count.sum()


def _uncertainty(share: Floats) -> Floats:
    """Return Brier score and NLL (b, 2) of forecasting the share (b,) of class 1 for every example."""
    return np.stack(
        [2 * share * (1 - share), -special.xlogy(share, share) - special.xlogy(1 - share, 1 - share)], axis=1
    )
