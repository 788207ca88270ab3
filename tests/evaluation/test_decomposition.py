"""The CORP decomposition against scikit-learn's isotonic regression, identities and known cases."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import brier_score_loss, log_loss

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import decomposition_scores
from bnncli.evaluation.statistics import examples_of


def forecasts(count: int = 400) -> tuple[NDArray, NDArray]:
    """Probabilities of class 1, with ties, that are overconfident, and labels."""
    generator = np.random.default_rng(0)
    forecast = generator.beta(0.6, 0.6, count).round(2)
    return forecast, (generator.random(count) < 0.2 + 0.6 * forecast).astype(int)


def parts(forecast: NDArray, labels: NDArray, weights: NDArray | None = None) -> NDArray:
    """Rows of miscalibration, discrimination and uncertainty: of the Brier score, of the NLL."""
    probs = np.column_stack([1 - forecast, forecast]).astype(np.float32)
    statistic = decomposition_scores(examples_of(probs, labels)).statistic
    assert statistic is not None
    return statistic(np.ones((1, len(labels))) if weights is None else weights).reshape(-1, 2, 3)


def test_the_recalibrated_score_is_that_of_scikit_learn() -> None:
    forecast, labels = forecasts()
    fitted = IsotonicRegression(y_min=0, y_max=1).fit_transform(forecast, labels)
    _, discrimination, uncertainty = parts(forecast, labels)[0].T
    expected = [2 * brier_score_loss(labels, fitted), log_loss(labels, fitted)]
    assert uncertainty - discrimination == pytest.approx(expected, rel=1e-9)


def test_the_parts_add_up_to_the_score() -> None:
    forecast, labels = forecasts()
    forecast = forecast.clip(0.01, 0.99)
    miscalibration, discrimination, uncertainty = parts(forecast, labels)[0].T
    expected = [2 * brier_score_loss(labels, forecast), log_loss(labels, forecast)]
    assert miscalibration - discrimination + uncertainty == pytest.approx(expected, rel=1e-5)
    assert min(miscalibration) > 0.01


def test_the_share_of_the_labels_as_forecast_leaves_uncertainty_alone() -> None:
    labels = np.repeat([0, 1], [30, 10])
    share = 0.25
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    expected = [[0, 0, 2 * share * (1 - share)], [0, 0, entropy]]
    assert parts(np.full(40, share), labels)[0] == pytest.approx(np.array(expected), abs=1e-7)


def test_a_perfect_order_leaves_no_recalibrated_error() -> None:
    labels = np.repeat([0, 1], [20, 20])
    for _, discrimination, uncertainty in parts(np.linspace(0.3, 0.5, 40), labels)[0]:
        assert discrimination == pytest.approx(uncertainty, rel=1e-12)


def test_equal_forecasts_do_not_differ_by_their_label() -> None:
    # Float32: 1 - p rounds to 1 for one label and p stays 1e-9 for the other.
    probs = np.tile(np.array([1, 1e-9], dtype=np.float32), (40, 1))
    statistic = decomposition_scores(examples_of(probs, np.repeat([0, 1], [30, 10]))).statistic
    assert statistic is not None
    assert statistic(np.ones((1, 40)))[0, [1, 4]] == pytest.approx([0, 0], abs=1e-12)


def test_weights_count_as_repeated_examples() -> None:
    forecast, labels = forecasts(150)
    (weights,) = next(Bootstrap(4).weights(("test", 150)))
    for row, measured in zip(weights.astype(int), parts(forecast, labels, weights), strict=True):
        again = np.repeat(np.arange(150), row)
        assert parts(forecast[again], labels[again])[0] == pytest.approx(measured, rel=1e-9)


def test_labels_of_one_class_have_no_uncertainty() -> None:
    found = parts(np.linspace(0.1, 0.9, 9), np.ones(9, dtype=int))[0]
    assert found[:, 1:] == pytest.approx(np.zeros((2, 2)), abs=1e-12)


def test_more_classes_have_no_decomposition() -> None:
    scores = decomposition_scores(examples_of(np.full((4, 3), 1 / 3), np.zeros(4, dtype=int)))
    assert (scores.statistic, scores.undefined) == (None, "expected two classes, got 3")
