"""Class-wise calibration error: is each class as frequent as its own probability says.

The static calibration error of Nixon et al. (2019), arXiv 1904.01685, section 3; classwise-ECE of Kull et al. (2019),
arXiv 1910.12656: the mean over classes of the binned gap between the probability of the class and its frequency.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import NUM_BINS, Bins, judged, total_form
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup
from bnncli.lazy import sparse


def class_wise_scores(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> ScoreGroup:
    """The class-wise ECE in bins of equal width.

    Args:
        probs: (N, C); may be mapped from a file: rows are read in blocks, each time the statistic is computed.
        labels: (N,) or None; (N, C) zeros and ones where each class is a label by itself, whose errors are told as well.
    """
    choices = {"bins": num_bins, "strategy": "class-wise", "norm": "l1"}
    members = [ScoreForm("ece", choices, False, bounds=(0.0, 1.0))]
    if labels is None:
        return ScoreGroup(members, None, NO_LABELS)
    num_classes = probs.shape[1]

    def statistic(weights: NDArray) -> Floats:
        sums = np.zeros((num_classes * num_bins, len(weights)))
        for rows in row_blocks(len(probs), max(num_classes, len(weights))):
            gaps = _gaps(np.array(probs[rows], dtype=np.float64), labels[rows], num_bins)
            sums += gaps.T @ weights[:, rows].T.astype(np.float64)
        return np.abs(sums).sum(axis=0)[:, None] / (num_classes * len(probs))

    has_several = labels.ndim == 2

    def judge(generator: np.random.Generator, level: float | None) -> list[dict[str, Any]]:
        bins = class_bins(probs, labels, num_bins=num_bins)
        if not has_several:
            return judged(bins, [total_form(float(bins.size.sum()))], generator, level)
        (found,) = judged(bins, [total_form(float(bins.size.sum()))], generator, None)
        # Labels of an example hang together: what is drawn of each by itself has the right mean, but too little spread for a
        # test. The bootstrap's interval would hold too seldom: the error of a label is biased upwards.
        return [{"floor": found["floor"], "interval": None}]

    def of_classes() -> list[list[float | None]]:
        sums = np.zeros(num_classes * num_bins)
        for rows in row_blocks(len(probs), num_classes):
            sums += _gaps(np.array(probs[rows], dtype=np.float64), labels[rows], num_bins).sum(axis=0)
        return [[float(value) for value in np.abs(sums).reshape(num_classes, -1).sum(axis=1) / max(1, len(probs))]]

    per_class = of_classes if has_several else None
    return ScoreGroup(members, statistic, cost=float(num_classes), against_chance=judge, per_class=per_class)


def class_bins(probs: NDArray, labels: NDArray, *, num_bins: int) -> Bins:
    """The bins of every class that hold anything, of the probability of the class and of whether it is the label.

    Of two classes that exclude each other the second's alone: the first's are their mirror images, and the same gaps twice would pass for twice
    as many. Labels of more classes are drawn as if independent, which leaves the spread of the error within 10 %.
    """
    num_classes = probs.shape[1]
    is_mirrored = labels.ndim == 1 and num_classes == 2
    chosen = np.arange(num_classes)[-1:] if is_mirrored else np.arange(num_classes)
    sums = np.zeros((4, len(chosen) * num_bins))
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    for rows in row_blocks(len(probs), num_classes):
        block = np.array(probs[rows], dtype=np.float64)[:, chosen]
        place = np.searchsorted(edges[1:-1], block, side="left") + num_bins * np.arange(len(chosen))
        own = labels[rows]
        is_label = own[:, None] == chosen if own.ndim == 1 else own != 0
        for total, values in zip(sums, (np.ones_like(block), block, block**2, is_label), strict=True):
            total += np.bincount(place.ravel(), weights=values.ravel(), minlength=len(total))
    return Bins(*sums[:, sums[0] > 0])


def _gaps(probs: NDArray, labels: NDArray, num_bins: int) -> sparse.csr_array:
    """Probability less one-hot label of each example and class, in the column of its class and bin; overwrites probs."""
    size, num_classes = probs.shape
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    column = np.searchsorted(edges[1:-1], probs, side="left") + num_bins * np.arange(num_classes)
    if labels.ndim == 1:
        probs[np.arange(size), labels] -= 1
    else:
        probs -= labels
    starts = np.arange(0, probs.size + 1, num_classes)
    return sparse.csr_array((probs.ravel(), column.ravel(), starts), shape=(size, num_classes * num_bins))
