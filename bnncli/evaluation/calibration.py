"""Calibration: expected and maximum calibration error, and the reliability data behind them.

Guo et al. (2017), arXiv 1706.04599, eq. (3) and (5), with every example in a bin: confidences of exactly 0
are in the first bin and those of exactly 1 in the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 15  # the usual choice since Guo et al. (2017)


@dataclass(frozen=True)
class Reliability:
    """What equal-width confidence bins hold; bin b is (edges[b], edges[b + 1]], the first includes 0.

    Args:
        edges: (B + 1,) from 0 to 1.
        count: (B,) examples per bin; they sum to N.
        confidence: (B,) mean confidence; NaN in an empty bin.
        accuracy: (B,) fraction of examples that are right; NaN in an empty bin.
    """

    edges: NDArray[np.float64]
    count: NDArray[np.int64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]

    @property
    def gap(self) -> NDArray[np.float64]:
        """Absolute difference (B,) of confidence and accuracy; 0 in an empty bin."""
        return np.where(self.count > 0, np.abs(self.confidence - self.accuracy), 0.0)

    @property
    def ece(self) -> float:
        """Mean gap, weighted by the count of each bin."""
        return float(np.sum(self.count * self.gap) / np.sum(self.count))

    @property
    def mce(self) -> float:
        """Largest gap of any bin that holds an example."""
        return float(np.max(self.gap))


def reliability(probs: NDArray, labels: NDArray, *, num_bins: int = NUM_BINS) -> Reliability:
    """Counts, confidence and accuracy in equal-width bins of the largest probability.

    Args:
        probs: (N, C), N at least 1; the first class wins a tie.
        labels: (N,) integers.
        num_bins: B, at least 1.
    """
    confidence = np.max(probs, axis=1).astype(np.float64)
    is_right = np.argmax(probs, axis=1) == labels
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    # Inner edges only: whatever lies below the first or above the last (0, 1, 1 + rounding) stays in the
    # outer bins.
    index = np.searchsorted(edges[1:-1], confidence, side="left")
    count = np.bincount(index, minlength=num_bins)
    size = np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        count=count,
        confidence=np.bincount(index, weights=confidence, minlength=num_bins) / size,
        accuracy=np.bincount(index, weights=is_right, minlength=num_bins) / size,
    )


def ece(probs: NDArray, labels: NDArray, *, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error in [0, 1]: mean |confidence - accuracy| over bins, weighted by count."""
    return reliability(probs, labels, num_bins=num_bins).ece


def mce(probs: NDArray, labels: NDArray, *, num_bins: int = NUM_BINS) -> float:
    """Maximum calibration error in [0, 1]: the largest |confidence - accuracy| of a bin in use."""
    return reliability(probs, labels, num_bins=num_bins).mce
