"""What scores need of class probabilities: a few numbers for each example, from one pass over blocks of rows.

A score is a function of these vectors, so that predictions larger than memory can be scored and resampled.
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
        confidence: (N,) float64, the largest probability.
        predicted: (N,) int64, the class that has it, the first among ties.
        entropy: (N,) float64, nats.
        squared_norm: (N,) float64, sum of the squared probabilities.
        labels: (N,) int64 in [0, C), or None for an unlabelled split; the rest is None with it.
        is_right: (N,) bool, the predicted class is the label.
        label_probability: (N,) float64.
        of_labels: what there is where classes are labels, of which an example has several; no other field about the label is.
        label_rank: (N,) int64, how many classes come before the label: the more probable ones and, among equals, those
            of smaller index; 0 exactly where is_right.
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
    """The numbers of each example of probs (N, C), which are read once, in blocks of rows, and checked.

    Args:
        probs: (N, C); may be mapped from a file.
        labels: (N,) integers in [0, C), or None; (N, C) zeros and ones where classes do not exclude each other.
        num_classes: the C that is expected.
        is_exclusive: whether they do.

    Raises:
        DataError: what is no probability, or labels of another length or outside [0, C).
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
    """Raise DataError when labels do not fit probabilities of this shape (N, C)."""
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
    """The vectors of a block of rows, by name."""
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
