"""Class-wise calibration error: is each class as frequent as its own probability says.

The static calibration error of Nixon et al. (2019), arXiv 1904.01685, section 3; classwise-ECE of Kull et al. (2019),
arXiv 1910.12656: the mean over classes of the binned gap between the probability of the class and its frequency.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from bnncli.evaluation.calibration import NUM_BINS
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.scores import NO_LABELS, Floats, Score, Scores


def class_wise_scores(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> Scores:
    """The class-wise ECE in bins of equal width.

    Args:
        probs: (N, C); may be mapped from a file: rows are read in blocks, each time the statistic is computed.
        labels: (N,) or None.
    """
    choices = {"bins": num_bins, "strategy": "class-wise", "norm": "l1"}
    members = [Score("ece", choices, False, method="basic", bounds=(0.0, 1.0))]
    if labels is None:
        return Scores(members, None, NO_LABELS)
    num_classes = probs.shape[1]

    def statistic(weights: NDArray) -> Floats:
        sums = np.zeros((num_classes * num_bins, len(weights)))
        for rows in row_blocks(len(probs), max(num_classes, len(weights))):
            gaps = _gaps(np.array(probs[rows], dtype=np.float64), labels[rows], num_bins)
            sums += gaps.T @ weights[:, rows].T.astype(np.float64)
        return np.abs(sums).sum(axis=0)[:, None] / (num_classes * len(probs))

    return Scores(members, statistic, cost=float(num_classes))


def _gaps(probs: NDArray, labels: NDArray, num_bins: int) -> sparse.csr_array:
    """Probability less one-hot label of each example and class, in the column of its class and bin; overwrites probs."""
    size, num_classes = probs.shape
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    column = np.searchsorted(edges[1:-1], probs, side="left") + num_bins * np.arange(num_classes)
    probs[np.arange(size), labels] -= 1
    starts = np.arange(0, probs.size + 1, num_classes)
    return sparse.csr_array((probs.ravel(), column.ravel(), starts), shape=(size, num_classes * num_bins))
