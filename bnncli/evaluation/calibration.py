"""Calibration errors of the largest probability: bins of it, and the errors in them.

Guo et al. (2017), arXiv 1706.04599, eq. (3) and (5), with every example in a bin: confidences of exactly 0 are in the
first bin and those of exactly 1 in the last. Bins of equal mass: Nguyen and O'Connor (2015), arXiv 1508.05154. Debiased:
Kumar, Liang and Ma (2019), arXiv 1909.10155, section 5. Replicates of the bootstrap keep the bins of the sample. Mirrored 95 % intervals hold the truth about nine
times in ten where it is well above the noise, and three times in four where it is 0 (2,000 examples, 15 bins; intervals
from quantiles never hold a truth of 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.examples import Examples
from bnncli.evaluation.scores import NO_LABELS, Floats, Score, Scores

NUM_BINS = 15  # the usual choice since Guo et al. (2017)
PUBLISHED_BINS = 100
_AT_ONCE = 1 << 14  # examples of one matrix product, so that no (N, B) array is made and float32 sums stay short


@dataclass(frozen=True)
class Reliability:
    """What confidence bins hold; bin b is (edges[b], edges[b + 1]], the first includes its lower edge.

    Args:
        edges: (B + 1,) from 0 to 1.
        count: (B,) examples per bin; they sum to N.
        confidence: (B,) mean confidence; NaN in an empty bin.
        accuracy: (B,) fraction of examples that are right; NaN in an empty bin.
    """

    edges: Floats
    count: NDArray[np.int64]
    confidence: Floats
    accuracy: Floats


def reliability(examples: Examples, *, num_bins: int = NUM_BINS, strategy: str = "equal-width") -> Reliability:
    """Counts, confidence and accuracy in bins of the confidence of labelled examples.

    Args:
        num_bins: B, at least 1.
        strategy: `equal-width`, or `equal-mass`: the edges are confidences such that bins hold N / B examples each, or as
            nearly as ties and rounding allow; equal confidences share a bin.
    """
    edges = _edges(examples.confidence, num_bins, strategy)
    index = _index(examples.confidence, edges)
    count = np.bincount(index, minlength=num_bins)
    size = np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        count=count,
        confidence=np.bincount(index, weights=examples.confidence, minlength=num_bins) / size,
        accuracy=np.bincount(index, weights=examples.is_right, minlength=num_bins) / size,
    )


def calibration_scores(examples: Examples, *, num_bins: int = NUM_BINS) -> list[Scores]:
    """ECE and MCE in bins of equal width and of equal mass, the debiased l2 error, and the published ECE."""
    if examples.is_right is None:
        nothing = np.zeros(0)
        groups = [_plain(nothing, nothing, num_bins, s) for s in ("equal-width", "equal-mass")]
        groups.append(_published(nothing, nothing))
        return [Scores(group.members, None, NO_LABELS) for group in groups]
    confidence, is_right = examples.confidence, examples.is_right.astype(np.float64)
    groups = [_plain(confidence, is_right, num_bins, strategy) for strategy in ("equal-width", "equal-mass")]
    return [*groups, _published(confidence, is_right)]


def bin_sums(weights: NDArray, index: NDArray, values: NDArray, *, num_bins: int) -> Floats:
    """Weighted sums (b, num_bins, m) of values (N, m) over the examples of each bin; index (N,), weights (b, N)."""
    sums = np.zeros((len(weights), num_bins * values.shape[1]))
    for start in range(0, len(index), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        bins = index[rows]
        spread = np.zeros((len(bins), num_bins, values.shape[1]), dtype=weights.dtype)
        spread[np.arange(len(bins)), bins] = values[rows]
        sums += weights[:, rows] @ spread.reshape(len(bins), -1)
    return sums.reshape(len(weights), num_bins, -1)


def _plain(confidence: NDArray, is_right: NDArray, num_bins: int, strategy: str) -> Scores:
    """ECE and MCE in bins of one strategy; with equal mass the debiased error as well, as its authors bin."""
    choices = {"bins": num_bins, "strategy": strategy}
    members = [_score("ece", {**choices, "norm": "l1"}), _score("mce", choices)]
    if strategy == "equal-mass":
        debiased = {**choices, "norm": "l2", "estimator": "debiased"}
        members.append(_score("ece", debiased, when_nan="no bin holds two examples, whose noise could be told"))
    index = _index(confidence, _edges(confidence, num_bins, strategy))
    values = np.stack([np.ones(len(confidence)), confidence - is_right, is_right], axis=1)[:, : len(members)]

    def statistic(weights: NDArray) -> Floats:
        sums = bin_sums(weights, index, values, num_bins=num_bins)
        count, gap = sums[..., 0], np.abs(sums[..., 1])
        mean_gap = gap / np.maximum(count, 1)
        found = [gap.sum(axis=1) / len(index), mean_gap.max(axis=1)]
        if strategy == "equal-mass":
            found.append(_debiased(count, mean_gap, sums[..., 2] / np.maximum(count, 1)))
        return np.stack(found, axis=1)

    return Scores(members, statistic)


def _debiased(count: Floats, gap: Floats, accuracy: Floats) -> Floats:
    """Root (b,) of the mean squared gap less what the noise of the accuracies adds to it; 0 where that is more.

    Kumar, Liang and Ma (2019), definition 5.2: E_b = gap^2 - accuracy (1 - accuracy) / (n - 1). Bins of one example say
    nothing: NaN where there are no others.
    """
    noise = accuracy * (1 - accuracy) / np.maximum(count - 1, 1)
    square = np.where(count > 1, gap**2 - noise, 0.0)
    error = np.sqrt(np.maximum(0.0, (count * square).sum(axis=1) / count.sum(axis=1)))
    return np.where((count > 1).any(axis=1), error, np.nan)


def _published(confidence: NDArray, is_right: NDArray) -> Scores:
    """The ECE of the script published with the refinement paper (Kristiadi et al. 2022, arXiv 2205.10041).

    np.digitize numbers 100 bins from 1; the script looks at 0 to 99 and so leaves out every confidence from 0.99 on, and
    gives the weight of those examples to the rest.
    """
    choices = {"bins": PUBLISHED_BINS, "strategy": "published", "norm": "l1"}
    edges = np.linspace(0, 1, PUBLISHED_BINS + 1)
    index = np.digitize(confidence, edges)
    is_used = index < PUBLISHED_BINS
    score = _score(
        "ece",
        choices,
        facts={"num_used": int(is_used.sum())},
        when_nan="every confidence is 0.99 or more, which the published script leaves out",
    )
    index = np.where(is_used, index, 0)
    values = np.stack([is_used, np.where(is_used, confidence - is_right, 0)], axis=1).astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        sums = bin_sums(weights, index, values, num_bins=PUBLISHED_BINS)
        used = sums[..., 0].sum(axis=1)
        gap = np.abs(sums[..., 1]).sum(axis=1)
        return np.divide(gap, used, out=np.full(len(gap), np.nan), where=used > 0)[:, None]

    return Scores([score], statistic)


def _score(name: str, choices: dict[str, object], **more: object) -> Score:
    make: Callable[..., Score] = Score
    return make(name, choices, False, method="basic", bounds=(0.0, 1.0), **more)


def _edges(confidence: NDArray, num_bins: int, strategy: str) -> Floats:
    """Edges (B + 1,) of the bins."""
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    if strategy == "equal-mass" and len(confidence):
        ranks = -(-len(confidence) * np.arange(1, num_bins) // num_bins)
        edges[1:-1] = np.sort(confidence)[np.maximum(ranks, 1) - 1]
    return edges


def _index(confidence: NDArray, edges: NDArray) -> NDArray[np.int64]:
    """The bin (N,) of each confidence."""
    # Inner edges only: whatever lies below the first or above the last (0, 1, 1 + rounding) stays in the
    # outer bins.
    return np.searchsorted(edges[1:-1], confidence, side="left")
