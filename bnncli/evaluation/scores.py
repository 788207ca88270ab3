"""Accuracy, negative log likelihood and Brier score of class probabilities against labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The smallest probability that the log sees: float32 probabilities underflow to 0, whose log would be
# infinite.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)


def accuracy(probs: NDArray, labels: NDArray) -> float:
    """Fraction of examples whose most probable class, the first among ties, is the label.

    Args:
        probs: (N, C), N at least 1.
        labels: (N,) integers in [0, C).
    """
    return float(np.mean(np.argmax(probs, axis=1) == labels))


def nll(probs: NDArray, labels: NDArray) -> float:
    """Mean negative log probability of the label, nats per example, clamped at SMALLEST_PROBABILITY."""
    return float(np.mean(nll_per_example(probs, labels)))


def nll_per_example(probs: NDArray, labels: NDArray) -> NDArray[np.float64]:
    """Negative log probability (N,) of each example's label, nats, clamped at SMALLEST_PROBABILITY."""
    return -np.log(np.maximum(_of_label(probs, labels), SMALLEST_PROBABILITY))


def brier(probs: NDArray, labels: NDArray) -> float:
    """Squared distance of probs to the one-hot label, summed over classes, mean over examples; in [0, 2]."""
    squares = np.einsum("nc,nc->n", probs, probs, dtype=np.float64)
    # |p - e_y|^2 = |p|^2 - 2 p_y + 1 spares the (N, C) one-hot array.
    return max(0.0, float(np.mean(squares - 2 * _of_label(probs, labels) + 1)))


def _of_label(probs: NDArray, labels: NDArray) -> NDArray[np.float64]:
    """Probability (N,) of each example's label."""
    column = np.asarray(labels, dtype=np.int64)[:, None]
    return np.take_along_axis(np.asarray(probs), column, axis=1)[:, 0].astype(np.float64)
