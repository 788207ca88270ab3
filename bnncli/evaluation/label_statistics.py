"""Predictions of several labels an example: what each of its decisions, whether a label is there or not, comes to.

A label is said to be there where its probability is at least a half. The probability of what is not there is one less that of
what is: stored as float32 it is known to 2^-25 at best, and counts as that where nothing is left of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.probabilities import row_blocks

THRESHOLD = 0.5  # from which on a label is said to be there
SMALLEST = float(np.finfo(np.float32).tiny)  # probability of a label that the log sees
SMALLEST_REST = 2.0**-25  # of its absence: half the distance from one to the float32 below


@dataclass(frozen=True)
class LabelStatistics:
    """Of N examples with L labels each; what needs the labels is None without.

    Args:
        labels: (N, L) zeros and ones.
        num_wrong: (N,) labels that are said to be there and are not, or the other way round.
        log_loss: (N,) mean over the labels of the negative log probability of what is, nats.
        squared_error: (N,) mean over the labels of the squared distance of the probability to 0 or 1.
        num_clamped: of all N L decisions, those whose probability the log does not see.
    """

    labels: NDArray | None = None
    num_wrong: NDArray[np.int64] | None = None
    log_loss: NDArray[np.float64] | None = None
    squared_error: NDArray[np.float64] | None = None
    num_clamped: int = 0


def label_statistics(probs: NDArray, labels: NDArray | None) -> LabelStatistics:
    """The numbers of each example of probs (N, L), which have been checked, read in blocks of rows.

    Raises:
        DataError: labels that are not (N, L) zeros and ones.
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
    """Negative log probability of what is, nats, of probs (n, L) and labels (n, L); and where it was clamped."""
    wide = np.asarray(probs, dtype=np.float64)
    likely = np.where(labels, wide, 1 - wide)
    smallest = np.where(labels, SMALLEST, SMALLEST_REST)
    return -np.log(np.maximum(likely, smallest)), likely < smallest


def check_label_sets(labels: NDArray, shape: tuple[int, ...]) -> None:
    """Raise DataError when labels are not zeros and ones of the shape (N, L) of the probabilities."""
    if labels.shape != shape:
        raise DataError(f"labels: expected shape {shape}, got {labels.shape}")
    if labels.size and not np.isin(labels, (0, 1)).all():
        raise DataError("labels: expected zeros and ones")
