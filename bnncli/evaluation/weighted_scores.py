"""Scores as functions of how often each example counts, and the losses that scores are means of.

Weights of one give a score itself, multinomial counts give its bootstrap replicates, by the same formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.label_statistics import decision_losses

# The smallest probability that the log sees: float32 probabilities underflow to 0, whose log would be
# infinite.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
NO_LABELS = "no labels"
Floats = NDArray[np.float64]
Statistic = Callable[[NDArray], Floats]


@dataclass(frozen=True)
class ScoreForm:
    """One score of a split.

    Args:
        name: accuracy, nll, ece and so on.
        choices: what tells its forms apart and defines the number.
        higher_is_better: None where neither is.
        method: of its bootstrap interval.
        bounds: its range.
        facts: numbers that are told with it, such as how many probabilities were clamped.
        when_nan: why it is undefined where the statistic is NaN.
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
        members: m of them.
        statistic: weights (b, N), whole numbers whose rows sum to N, to the scores (b, m); None where undefined.
        undefined: the reason.
        cost: operations an example and replicate, relative to a mean's; dear scores get fewer replicates.
        against_chance: of calibration errors: a generator and the level of the intervals, or None for none, to what the
            row of each member gains: `floor`, `p_calibrated` and, with a level, its `interval`.
        per_class: of means over classes: what `per_class` of each member's row is, None where undefined.
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
        # In float64: float32 is enough for one score, but the differences that are made of replicates may be below
        # its rounding.
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

    Of several labels an example, (N, L), the mean over them: of each being there or not.
    """
    if labels.ndim == 2:
        return decision_losses(probs, labels != 0)[0].mean(axis=1)
    column = np.asarray(labels, dtype=np.int64)[:, None]
    return log_losses(np.take_along_axis(np.asarray(probs), column, axis=1)[:, 0])
