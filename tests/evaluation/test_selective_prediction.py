"""The area under the risk-coverage curve against loops over every order of ties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import selective_scores
from bnncli.evaluation.statistics import ExampleStatistics


def examples(confidence: Sequence[float] | NDArray, is_right: Sequence[bool] | NDArray) -> ExampleStatistics:
    """Examples with these confidences, right or wrong."""
    level, right = np.asarray(confidence, dtype=float), np.asarray(is_right, dtype=bool)
    whole = np.where(right, 0, 1)
    return ExampleStatistics(2, level, 0 * whole, level, level, whole, right, level, whole)


def areas(one: ExampleStatistics, weights: NDArray | None = None) -> NDArray:
    statistic = selective_scores(one).statistic
    assert statistic is not None
    return statistic(np.ones((1, len(one))) if weights is None else weights)


def curve_area(is_right: Sequence[bool]) -> float:
    """Mean error rate among the first i, in this order."""
    errors = np.cumsum(~np.asarray(is_right, dtype=bool))
    return float(np.mean(errors / np.arange(1, len(errors) + 1)))


def random_examples(count: int = 80) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(0)
    confidence = generator.permutation(np.linspace(0.3, 1, count))
    return confidence, generator.random(count) < confidence


def test_the_area_is_the_loop_along_the_curve() -> None:
    confidence, is_right = random_examples()
    area, excess = areas(examples(confidence, is_right))[0]
    assert area == pytest.approx(curve_area(is_right[np.argsort(-confidence)]), rel=1e-12)
    best = curve_area(np.sort(is_right)[::-1])
    assert excess == pytest.approx(area - best, rel=1e-9)


def test_ties_count_as_the_mean_over_their_orders() -> None:
    confidence = [0.9, 0.8, 0.8, 0.8, 0.5, 0.5]
    is_right = [True, False, True, False, True, False]
    orders = [
        [is_right[0], *middle, *last]
        for middle in itertools.permutations(is_right[1:4])
        for last in itertools.permutations(is_right[4:])
    ]
    expected = np.mean([curve_area(order) for order in orders])
    assert areas(examples(confidence, is_right))[0, 0] == pytest.approx(expected, rel=1e-12)


def test_the_area_of_equal_confidences_is_the_error_rate() -> None:
    area, _ = areas(examples(np.full(30, 0.7), np.arange(30) % 3 > 0))[0]
    assert area == pytest.approx(1 / 3, rel=1e-12)


def test_the_order_of_examples_does_not_matter() -> None:
    confidence, is_right = random_examples()
    confidence = confidence.round(1)
    order = np.random.default_rng(1).permutation(len(confidence))
    assert areas(examples(confidence[order], is_right[order])) == pytest.approx(
        areas(examples(confidence, is_right)), rel=1e-12
    )


@pytest.mark.parametrize(
    ("is_right", "expected"),
    [
        ([True] * 5, (0, 0)),
        ([False] * 5, (1, 0)),
        ([True, True, False], (1 / 9, 0)),
        ([False, True], (3 / 4, 1 / 2)),
        ([True], (0, 0)),
        ([False], (1, 0)),
    ],
)
def test_known_areas(is_right: list[bool], expected: tuple[float, float]) -> None:
    confidence = np.linspace(1, 0.5, len(is_right))
    assert areas(examples(confidence, is_right))[0] == pytest.approx(expected, abs=1e-12)


def test_weights_count_as_repeated_examples() -> None:
    confidence, is_right = random_examples()
    confidence = confidence.round(1)
    (weights,) = next(Bootstrap(5).weights(("test", 80)))
    measured = areas(examples(confidence, is_right), weights)
    for row, expected in zip(weights.astype(int), measured, strict=True):
        again = np.repeat(np.arange(80), row)
        assert areas(examples(confidence[again], is_right[again]))[0] == pytest.approx(expected, rel=1e-9)
