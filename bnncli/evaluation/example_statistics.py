"""Per-example statistics of class probabilities, from one pass over blocks of rows.

Scores are functions of these vectors, so predictions larger than memory can be scored and resampled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.label_statistics import LabelStatistics, label_statistics
from bnncli.evaluation.probabilities import checked_blocks
from bnncli.lazy import special


@dataclass(frozen=True)
class ExampleStatistics:
    """Predictions of a split, example by example.

    Args:
        num_classes: C.
        confidence: (N,) float64, largest probability.
        predicted: (N,) int64, most probable class, the first among ties.
        entropy: (N,) float64, nats.
        squared_norm: (N,) float64, sum of the squared probabilities.
        labels: (N,) int64 in [0, C), or None for an unlabelled split; the fields below are then None as well.
        is_right: (N,) bool, whether the predicted class is the label.
        label_probability: (N,) float64.
        label_rank: (N,) int64, number of classes ranked before the label, ties by index; 0 exactly if is_right.
        of_labels: statistics of multi-label predictions, which have no other field about labels.
    """

    num_classes: int
    confidence: NDArray[np.float64]
    predicted: NDArray[np.int64]
    entropy: NDArray[np.float64]
    squared_norm: NDArray[np.float64]
    labels: NDArray[np.int64] | None = None
    is_right: NDArray[np.bool_] | None = None
    label_probability: NDArray[np.float64] | None = None
    label_rank: NDArray[np.int64] | None = None
    of_labels: LabelStatistics | None = None

    def __len__(self) -> int:
        return len(self.confidence)


def examples_of(
    probs: NDArray, labels: NDArray | None = None, *, num_classes: int | None = None, is_exclusive: bool = True
) -> ExampleStatistics:
    """Compute the statistics of probs (N, C) in one checked pass over blocks of rows.

    Args:
        probs: (N, C); may be memory-mapped.
        labels: (N,) integers in [0, C), or None; (N, C) zeros and ones for multi-label predictions.
        num_classes: expected C.
        is_exclusive: whether classes are mutually exclusive.

    Raises:
        DataError: values are not probabilities, or labels have another length or are outside [0, C).
    """
    size = probs.shape[1] if num_classes is None else num_classes
    if labels is not None and is_exclusive:
        check_labels(labels, probs.shape)
    classes = labels if is_exclusive else None
    found = [
        _of_block(
            block, None if classes is None else np.asarray(classes[rows], dtype=np.int64), is_exclusive=is_exclusive
        )
        for rows, block in checked_blocks(probs, size, is_exclusive=is_exclusive)
    ]
    if not found:
        nothing = None if classes is None else np.empty(0, dtype=np.int64)
        found = [_of_block(np.empty((0, size)), nothing, is_exclusive=is_exclusive)]
    names = [spec.name for spec in fields(ExampleStatistics) if spec.name in found[0]]
    vectors: dict[str, Any] = {name: np.concatenate([part[name] for part in found]) for name in names}
    return ExampleStatistics(size, **vectors, of_labels=None if is_exclusive else label_statistics(probs, labels))


def check_labels(labels: NDArray, shape: tuple[int, ...]) -> None:
    """Raise DataError if labels do not fit probabilities of shape (N, C)."""
    if labels.shape != shape[:1]:
        raise DataError(f"labels: expected shape ({shape[0]},), got {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels: expected integers, got {labels.dtype}")
    if labels.size == 0:
        return
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= shape[1]:
        raise DataError(f"labels: expected 0 to {shape[1] - 1}, got {smallest} to {largest}")


def _of_block(probs: NDArray, labels: NDArray[np.int64] | None, *, is_exclusive: bool) -> dict[str, NDArray]:
    """Return the vectors of a block of rows, by name."""
    predicted = probs.argmax(axis=1)
    wide = probs.astype(np.float64)
    out: dict[str, NDArray] = {
        "confidence": np.take_along_axis(wide, predicted[:, None], axis=1)[:, 0],
        "predicted": predicted.astype(np.int64),
        "entropy": special.entr(np.maximum(wide, 0)).sum(axis=1),  # rounding may leave -1e-8
        "squared_norm": np.einsum("nc,nc->n", wide, wide),
    }
    if not is_exclusive:
        out["entropy"] = out["entropy"] + special.entr(np.clip(1 - wide, 0, 1)).sum(axis=1)
    if labels is not None:
        own = np.take_along_axis(wide, labels[:, None], axis=1)
        is_before = np.arange(probs.shape[1]) < labels[:, None]
        rank = (wide > own).sum(axis=1) + ((wide == own) & is_before).sum(axis=1)
        out |= {"labels": labels, "is_right": rank == 0, "label_probability": own[:, 0], "label_rank": rank}
    return out
