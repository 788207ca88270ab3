"""Calibration of the decisions of several labels an example: is a label there as often as its probability says.

All decisions are pooled in bins of equal width of the probability that a label is there (Guo et al. 2017, arXiv 1706.04599,
eq. (3), of N L binary decisions). Labels of one example hang together in the world, whatever a model says: floor, test and
interval are those of bnncli.evaluation.calibrated with the noise that the examples themselves show, each with all its labels
(cluster-robust: Liang and Zeger 1986, Biometrika 73, 13).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibrated import FEWEST_EVENTS, NUM_DRAWS, Gaps, against_chance, floor_of
from bnncli.evaluation.calibration import NUM_BINS, Reliability, total_form
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup


class _Sums(NamedTuple):
    """Sums (N, B) over the labels of each example whose probability lies in each bin: how many, probabilities, ones, p (1 - p)."""

    size: Floats
    stated: Floats
    observed: Floats
    variance: Floats


def pooled_calibration(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> ScoreGroup:
    """The ECE of all decisions together.

    Args:
        probs: (N, L); may be mapped from a file.
        labels: (N, L) zeros and ones, or None.
    """
    choices = {"bins": num_bins, "strategy": "equal-width", "norm": "l1", "average": "micro"}
    members = [ScoreForm("ece", choices, False, bounds=(0.0, 1.0))]
    if labels is None:
        return ScoreGroup(members, None, NO_LABELS)
    sums, size = _sums(probs, labels, num_bins), float(max(1, probs.size))
    gaps = sums.stated - sums.observed

    def statistic(weights: NDArray) -> Floats:
        return np.abs(weights.astype(np.float64) @ gaps).sum(axis=1, keepdims=True) / size

    def judge(generator: np.random.Generator, level: float | None) -> list[dict[str, Any]]:
        drawn, form = _drawn_gaps(sums, generator), total_form(size)
        return [floor_of(drawn, form) if level is None else against_chance(drawn, form, level=level)]

    return ScoreGroup(members, statistic, against_chance=judge)


def _drawn_gaps(sums: _Sums, generator: np.random.Generator) -> Gaps:
    """Gaps of the bins that hold anything, with normal noise of the covariance that the examples' own gaps have.

    A calibrated model's have no less in all than those of independent labels: examples that are all alike show none.
    """
    is_used = sums.size.sum(axis=0) > 0
    own = (sums.stated - sums.observed)[:, is_used]
    centred = own - own.mean(axis=0)
    covariance = centred.T @ centred * len(own) / max(1, len(own) - 1)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    calibrated, noise = (generator.standard_normal((NUM_DRAWS, len(root))) @ root.T for _ in range(2))
    independent = sums.variance.sum(axis=0)[is_used]
    lacking = max(0.0, 1 - float(np.trace(covariance)) / max(float(independent.sum()), 1e-300))
    calibrated = calibrated + generator.standard_normal(calibrated.shape) * np.sqrt(lacking * independent)
    events = (sums.stated / np.maximum(sums.size, 1)).sum(axis=0)  # the labels of one example may all be the same one
    return Gaps(own.sum(axis=0), calibrated, noise, events[is_used] < FEWEST_EVENTS)


def label_reliability(probs: NDArray, labels: NDArray, *, num_bins: int = NUM_BINS) -> Reliability:
    """Counts, mean probabilities and shares of labels that are there, in bins of equal width of all N L probabilities."""
    totals = [part.sum(axis=0) for part in _sums(probs, labels, num_bins)[:3]]
    size = np.where(totals[0] > 0, totals[0], np.nan)
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    return Reliability(edges, totals[0].astype(np.int64), confidence=totals[1] / size, accuracy=totals[2] / size)


def _sums(probs: NDArray, labels: NDArray, num_bins: int) -> _Sums:
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    found = np.zeros((4, len(probs), num_bins))
    for rows in row_blocks(*probs.shape):
        block, own = np.array(probs[rows], dtype=np.float64), np.asarray(labels[rows]) != 0
        place = np.searchsorted(edges[1:-1], block, side="left") + num_bins * np.arange(len(block))[:, None]
        for total, values in zip(found, (np.ones_like(block), block, own, block * (1 - block)), strict=True):
            sums = np.bincount(place.ravel(), weights=values.ravel(), minlength=len(block) * num_bins)
            total[rows] = sums.reshape(len(block), num_bins)
    return _Sums(*found)
