"""Confidence of predictions for figures, from one pass over blocks of rows: counts per bin and the most extreme rows.

Curves computed from the counts pass through exact points of the curves of all examples. Their thresholds are the bin
edges, which are dense near 1, where most confidences are. Memory does not grow with the number of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import NUM_BINS
from bnncli.evaluation.curves import Curve, thinned
from bnncli.evaluation.probabilities import checked_blocks

MOST_POINTS = 64  # of a curve that is also shown as a table
HISTOGRAM_EDGES = np.linspace(0.0, 1.0, 21)
_NEAR_ONE = 1 - np.geomspace(0.5, 1e-7, 600)  # float32 resolves 1 from 1 - 6e-8
EDGES = np.unique(np.concatenate([np.linspace(0.0, 1.0, 501), HISTOGRAM_EDGES, _NEAR_ONE, [1.0]]))


class PredictedRow(NamedTuple):
    """One example: row, predicted class, its probability, and the label if known."""

    row: int
    predicted: int
    confidence: float
    label: int | None


@dataclass(frozen=True)
class BinnedConfidence:
    """Counts of a split's examples by confidence.

    Args:
        edges: (B + 1,); bin b is (edges[b], edges[b + 1]], the first includes its lower edge.
        count: (B,), examples per bin.
        stated: (B,), sums of the confidence.
        right: (B,), correctly classified examples; None without labels.
        most_certain, least_certain, most_certain_errors: extreme rows, most extreme first; no errors without labels.
    """

    edges: NDArray[np.float64]
    count: NDArray[np.int64]
    stated: NDArray[np.float64]
    right: NDArray[np.int64] | None
    most_certain: list[PredictedRow] = field(default_factory=list)
    least_certain: list[PredictedRow] = field(default_factory=list)
    most_certain_errors: list[PredictedRow] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""
        return int(self.count.sum())

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions; None without labels or examples."""
        return None if self.right is None or not self.num_examples else float(self.right.sum() / self.num_examples)

    def histogram(self) -> list[int]:
        """Return the counts between HISTOGRAM_EDGES."""
        return _between(self.edges, self.count, HISTOGRAM_EDGES).tolist()

    def reliability(self, num_bins: int = NUM_BINS) -> Curve | None:
        """Return the same as curves.reliability_curve, whose edges must be among these; None without labels."""
        if self.right is None:
            return None
        edges = np.linspace(0.0, 1.0, num_bins + 1)
        count, stated, right = (_between(self.edges, part, edges) for part in (self.count, self.stated, self.right))
        means = {"confidence": stated, "accuracy": right}
        found: Curve = {"edges": edges.tolist(), "count": count.tolist()}
        for name, total in means.items():
            found[name] = [float(part / size) if size else None for part, size in zip(total, count, strict=True)]
        return found

    def risk_coverage(self) -> Curve | None:
        """Return points of curves.risk_coverage_curve; None without labels or examples."""
        if self.right is None or not self.num_examples:
            return None
        is_used = self.count[::-1] > 0
        count, right = (np.cumsum(part[::-1])[is_used] for part in (self.count, self.right))
        return thinned({"coverage": count / count[-1], "risk": 1 - right / count}, MOST_POINTS)

    def roc(self, other: BinnedConfidence) -> Curve | None:
        """Return points of curves.roc_curve, with this split as in-distribution; None if either split is empty."""
        if not self.num_examples or not other.num_examples:
            return None
        is_used = (self.count + other.count)[::-1] > 0
        inside, outside = (np.append(0, np.cumsum(part.count[::-1])[is_used]) for part in (self, other))
        return thinned({"fpr": outside / outside[-1], "tpr": inside / inside[-1]}, MOST_POINTS)


def bin_confidence(
    probs: NDArray,
    labels: NDArray | None,
    *,
    is_exclusive: bool = True,
    num_extremes: int = 0,
    extra_edges: Sequence[float] = (),
    poll: Callable[[], None] = lambda: None,
) -> BinnedConfidence:
    """Count probs (N, C) by confidence in one pass over checked blocks of rows; probs may be memory-mapped.

    Args:
        labels: (N,) integers in [0, C), or None; ignored for multi-label predictions.
        num_extremes: rows to keep at each end.
        extra_edges: additional bin edges.
        poll: called between blocks.

    Raises:
        DataError: probs contains values that are not probabilities.
    """
    edges = np.unique(np.concatenate([EDGES, np.linspace(0.0, 1.0, NUM_BINS + 1), extra_edges]))
    size, has_labels = len(edges) - 1, labels is not None and is_exclusive
    count, stated, right = np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64)
    certain, uncertain, wrong = _Ends(num_extremes, -1), _Ends(num_extremes, 1), _Ends(num_extremes, -1)
    for rows, block in checked_blocks(probs, probs.shape[1], is_exclusive=is_exclusive):
        predicted = block.argmax(axis=1)
        confidence = np.take_along_axis(block, predicted[:, None], axis=1)[:, 0].astype(np.float64)
        index = np.searchsorted(edges[1:-1], confidence, side="left")
        count += np.bincount(index, minlength=size)
        stated += np.bincount(index, weights=confidence, minlength=size)
        own = np.asarray(labels[rows]) if labels is not None and has_labels else None
        every = np.arange(len(block))
        if own is not None:
            is_right = predicted == own
            right += np.bincount(index[is_right], minlength=size)
            wrong.offer(rows.start, every[~is_right], predicted, confidence, own)
        for ends in (certain, uncertain):
            ends.offer(rows.start, every, predicted, confidence, own)
        poll()
    return BinnedConfidence(
        edges, count, stated, right if has_labels else None, certain.kept, uncertain.kept, wrong.kept
    )


def _between(edges: NDArray, values: NDArray, coarse: NDArray) -> NDArray:
    """Sum values (B,) of bins between coarser edges, all of which must be bin edges."""
    places = np.searchsorted(edges, coarse)
    return np.add.reduceat(values, places[:-1])


class _Ends:
    """The rows with the smallest (sign 1) or largest (sign -1) confidence so far; ties keep the first."""

    def __init__(self, size: int, sign: int) -> None:
        self.size, self.sign = size, sign
        self.kept: list[PredictedRow] = []

    def offer(
        self, start: int, among: NDArray, predicted: NDArray, confidence: NDArray, labels: NDArray | None
    ) -> None:
        """Add the rows of another block, given by their index in it."""
        if self.size == 0:
            return
        chosen = among[np.argsort(self.sign * confidence[among], kind="stable")[: self.size]]
        found = [
            PredictedRow(
                start + int(place),
                int(predicted[place]),
                float(confidence[place]),
                None if labels is None else int(labels[place]),
            )
            for place in chosen
        ]
        self.kept = sorted([*self.kept, *found], key=lambda one: (self.sign * one.confidence, one.row))[: self.size]
