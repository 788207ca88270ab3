"""Per-example statistics of multi-label predictions.

A label is predicted as present if its probability is at least 0.5. The probability of its absence is one minus that:
float32 resolves it to 2^-25 at best, which replaces 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.probabilities import row_blocks

THRESHOLD = 0.5  # predict a label as present from here on
SMALLEST = float(np.finfo(np.float32).tiny)  # clamp for the log probability of a present label
SMALLEST_REST = 2.0**-25  # clamp for its absence: half the distance from 1 to the next lower float32


@dataclass(frozen=True)
class LabelStatistics:
    """Statistics of N examples with L labels each; None if the labels are unknown.

    Args:
        labels: (N, L) zeros and ones.
        num_wrong: (N,) number of wrong decisions.
        log_loss: (N,) negative log probability of the truth, mean over labels, nats.
        squared_error: (N,) squared distance of the probability to 0 or 1, mean over labels.
        num_clamped: number of the N L decisions whose log probability is clamped.
    """

    labels: NDArray | None = None
    num_wrong: NDArray[np.int64] | None = None
    log_loss: NDArray[np.float64] | None = None
    squared_error: NDArray[np.float64] | None = None
    num_clamped: int = 0


def label_statistics(probs: NDArray, labels: NDArray | None) -> LabelStatistics:
    """Compute the statistics of checked probs (N, L) in blocks of rows.

    Raises:
        DataError: labels are not (N, L) zeros and ones.
    """
    if labels is None:
        return LabelStatistics()
    check_label_sets(labels, probs.shape)
    sums = np.zeros((3, len(probs)))
    num_clamped = 0
    for rows in row_blocks(*probs.shape):
        block, own = np.asarray(probs[rows], dtype=np.float64), np.asarray(labels[rows]) != 0
        losses, is_clamped = decision_losses(block, own)
        num_clamped += int(is_clamped.sum())
        sums[:, rows] = (
            ((block >= THRESHOLD) != own).sum(axis=1),
            losses.mean(axis=1),
            ((block - own) ** 2).mean(axis=1),
        )
    return LabelStatistics(labels, sums[0].astype(np.int64), sums[1], sums[2], num_clamped)


def decision_losses(probs: NDArray, labels: NDArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the negative log probability of the truth (n, L), nats, and where it was clamped."""
    wide = np.asarray(probs, dtype=np.float64)
    likely = np.where(labels, wide, 1 - wide)
    smallest = np.where(labels, SMALLEST, SMALLEST_REST)
    return -np.log(np.maximum(likely, smallest)), likely < smallest


def check_label_sets(labels: NDArray, shape: tuple[int, ...]) -> None:
    """Raise DataError if labels are not zeros and ones of the shape (N, L) of the probabilities."""
    if labels.shape != shape:
        raise DataError(f"labels: expected shape {shape}, got {labels.shape}")
    if labels.size and not np.isin(labels, (0, 1)).all():
        raise DataError("labels: expected zeros and ones")
