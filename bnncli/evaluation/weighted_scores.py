"""Scores as functions of how often each example counts, and the losses that scores average.

Weights of one give the score itself, multinomial counts its bootstrap replicates, by the same formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.label_statistics import decision_losses

# Clamp for log probabilities: float32 probabilities underflow to 0, whose log is infinite.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
NO_LABELS = "no labels"
Floats = NDArray[np.float64]
Statistic = Callable[[NDArray], Floats]


@dataclass(frozen=True)
class ScoreForm:
    """One score of a split.

    Args:
        name: accuracy, nll, ece and so on.
        choices: settings that define the number and distinguish its forms.
        higher_is_better: None if no direction is better.
        method: method of the bootstrap interval.
        bounds: range of the score.
        facts: accompanying numbers, such as how many probabilities were clamped.
        when_nan: why the score is undefined if the statistic is NaN.
    """

    name: str
    choices: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool | None = False
    method: str = "percentile"
    bounds: tuple[float, float] = (0.0, np.inf)
    facts: Mapping[str, Any] = field(default_factory=dict)
    when_nan: str = "undefined"


@dataclass(frozen=True)
class ScoreGroup:
    """Scores that are computed together.

    Args:
        members: the m scores.
        statistic: maps integer weights (b, N), rows summing to N, to scores (b, m); None if undefined.
        undefined: the reason.
        cost: operations per example and replicate relative to a mean; expensive scores get fewer replicates.
        against_chance: for calibration errors, maps a generator and the level of intervals (None for no intervals) to
            the extra fields of each member's row: `floor`, `p_calibrated` and, with a level, `interval`.
        per_class: for means over classes, returns the `per_class` values of each member's row, None if undefined.
    """

    members: Sequence[ScoreForm]
    statistic: Statistic | None
    undefined: str | None = None
    cost: float = 1.0
    against_chance: Callable[[np.random.Generator, float | None], list[dict[str, Any]]] | None = None
    per_class: Callable[[], list[list[float | None]]] | None = None


def means(members: Sequence[ScoreForm], values: Sequence[NDArray]) -> ScoreGroup:
    """Return scores that are the mean over examples of a vector (N,) each."""
    columns = np.stack([np.asarray(value, dtype=np.float64) for value in values], axis=1)

    def statistic(weights: NDArray) -> Floats:
        # float64: differences of replicates may be below float32 rounding.
        return weights.astype(np.float64) @ columns / len(columns)

    return ScoreGroup(members, statistic)


def log_losses(label_probability: NDArray) -> Floats:
    """Return -log p(label) of each example (N,), nats, clamped at SMALLEST_PROBABILITY."""
    return -np.log(np.maximum(label_probability.astype(np.float64), SMALLEST_PROBABILITY))


def brier_losses(examples: ExampleStatistics) -> Floats:
    """Return the squared distance (N,) of the probabilities to the one-hot label, summed over classes; in [0, 2]."""
    assert examples.label_probability is not None
    return np.maximum(0.0, examples.squared_norm - 2 * examples.label_probability + 1)


def nll(probs: NDArray, labels: NDArray) -> float:
    """Return the NLL of probs (N, C), nats per example: the mean of -log p(label), clamped at SMALLEST_PROBABILITY."""
    return float(np.mean(nll_per_example(probs, labels)))


def nll_per_example(probs: NDArray, labels: NDArray) -> Floats:
    """Return -log p(label) of each example (N,), nats, clamped at SMALLEST_PROBABILITY.

    For multi-label predictions (N, L), the mean over labels of whether each is present.
    """
    if labels.ndim == 2:
        return decision_losses(probs, labels != 0)[0].mean(axis=1)
    column = np.asarray(labels, dtype=np.int64)[:, None]
    return log_losses(np.take_along_axis(np.asarray(probs), column, axis=1)[:, 0])
