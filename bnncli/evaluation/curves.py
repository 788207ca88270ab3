"""Curves for figures: reliability, risk against coverage, ROC, histograms of confidence, traces and densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import NUM_BINS, Reliability, label_reliability, reliability
from bnncli.evaluation.statistics import ExampleStatistics, check_blocks
from bnncli.lazy import special

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
        return thin_curve({"coverage": count / count[-1], "risk": 1 - right / count}, MOST_POINTS)

    def roc(self, other: BinnedConfidence) -> Curve | None:
        """Return points of curves.roc_curve, with this split as in-distribution; None if either split is empty."""
        if not self.num_examples or not other.num_examples:
            return None
        is_used = (self.count + other.count)[::-1] > 0
        inside, outside = (np.append(0, np.cumsum(part.count[::-1])[is_used]) for part in (self, other))
        return thin_curve({"fpr": outside / outside[-1], "tpr": inside / inside[-1]}, MOST_POINTS)


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
    for rows, block in check_blocks(probs, probs.shape[1], is_exclusive=is_exclusive):
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


MAX_POINTS = 200  # per curve: a quarter of the width of a figure in pixels
_DIGITS = 6

Curve = dict[str, list[Any]]


def reliability_curve_of_predictions(
    probs: NDArray, examples: ExampleStatistics, *, num_bins: int = NUM_BINS
) -> Curve | None:
    """Return the reliability curve, for multi-label predictions that of all decisions; None without labels or examples.

    Args:
        probs: (N, C), from which `examples` was computed; may be memory-mapped.
    """
    if len(examples) == 0:
        return None
    if examples.is_right is not None:
        return reliability_curve(examples, num_bins=num_bins)
    own = examples.of_labels
    if own is None or own.labels is None:
        return None
    return curve_of_bins(label_reliability(probs, own.labels, num_bins=num_bins))


def reliability_curve(examples: ExampleStatistics, *, num_bins: int = NUM_BINS) -> Curve:
    """Return edges (B + 1,), count, confidence and accuracy (B,) of equal-width bins; None in empty bins.

    Args:
        examples: labelled.
    """
    return curve_of_bins(reliability(examples, num_bins=num_bins))


def curve_of_bins(bins: Reliability) -> Curve:
    """Return bins in the form of reliability_curve."""
    means = {"confidence": bins.confidence, "accuracy": bins.accuracy}
    shown: Curve = {"edges": bins.edges.tolist(), "count": bins.count.tolist()}
    return shown | {name: [None if np.isnan(v) else float(v) for v in values] for name, values in means.items()}


def frequency_interval(share: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a frequency (Clopper and Pearson 1934), with coverage of at least `level`.

    Args:
        share: share of `count` independent examples for which the event happened.
    """
    happened, tail = round(share * count), (1 - level) / 2
    low = float(special.betaincinv(happened, count - happened + 1, tail)) if happened else 0.0
    high = float(special.betaincinv(happened + 1, count - happened, 1 - tail)) if happened < count else 1.0
    return low, high


def risk_coverage_curve(confidence: NDArray, is_right: NDArray) -> Curve:
    """Return coverage, ascending to 1, and risk at each distinct confidence (N,), N >= 1; at most MAX_POINTS points."""
    order = np.argsort(-confidence, kind="stable")
    last = np.append(np.diff(confidence[order]) != 0, True)
    count = np.arange(1, len(order) + 1)[last]
    wrong = np.cumsum(~is_right[order].astype(bool))[last]
    return thin_curve({"coverage": count / len(order), "risk": wrong / count})


def roc_curve(scores_in: NDArray, scores_out: NDArray, most: int | None = None) -> Curve:
    """Return fpr and tpr, ascending from 0 to 1, over thresholds on non-empty scores (N,) and (M,); at most `most` points."""
    scores = np.concatenate([scores_in, scores_out])
    is_in = np.arange(len(scores)) < len(scores_in)
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    accepted_in, accepted_out = (np.append(0, np.cumsum(side[order])[last]) for side in (is_in, ~is_in))
    return thin_curve({"fpr": accepted_out / len(scores_out), "tpr": accepted_in / len(scores_in)}, most)


def thin_curve(curve: dict[str, NDArray], most: int | None = None) -> Curve:
    """Thin a curve to at most `most` points (MAX_POINTS by default), evenly spaced along it, keeping both ends."""
    most = MAX_POINTS if most is None else most
    points = np.stack(list(curve.values()), axis=1)
    if len(points) > most:
        way = np.append(0, np.cumsum(np.abs(np.diff(points, axis=0)).sum(axis=1)))
        wanted = np.linspace(0, way[-1], most)
        places = np.unique(np.append(np.searchsorted(way, wanted[:-1]), len(points) - 1))
        points = points[places]
    return {name: np.round(points[:, column], _DIGITS).tolist() for column, name in enumerate(curve)}


BAND = 0.99  # probability that a bar of a rank histogram is within its band


def block_means(draws: NDArray, num_blocks: int) -> tuple[list[float], NDArray[np.float64]]:
    """Return the midpoints (from 1) of at most num_blocks blocks of draws (C, T) and each chain's means in them (C, B)."""
    edges = np.linspace(0, draws.shape[1], min(num_blocks, draws.shape[1]) + 1).round().astype(int)
    sums = np.add.reduceat(draws.astype(np.float64), edges[:-1], axis=1)
    return ((edges[:-1] + 1 + edges[1:]) / 2).tolist(), sums / np.diff(edges)


def rank_counts(draws: NDArray, num_bins: int) -> NDArray[np.int64]:
    """Count how many draws (C, T) of each chain fall into each of num_bins equal parts of the pooled ranks, (C, B).

    Ties, which a chain that rejects moves repeats, share their mean rank.
    """
    flat = draws.ravel()
    _, where, size = np.unique(flat, return_inverse=True, return_counts=True)
    rank = (np.cumsum(size) - (size + 1) / 2)[where.ravel()].reshape(draws.shape)
    place = np.minimum((rank / len(flat) * num_bins).astype(int), num_bins - 1)
    return np.stack([np.bincount(chain, minlength=num_bins) for chain in place])


def rank_band(num_draws: int, num_bins: int) -> tuple[float, float]:
    """Return the binomial bounds within which a bar of a chain of independent draws stays with probability BAND."""
    share, tail = 1 / num_bins, (1 - BAND) / 2
    low = next(k for k in range(num_draws + 1) if special.bdtr(k, num_draws, share) >= tail)
    high = next(k for k in range(num_draws, -1, -1) if k == 0 or special.bdtrc(k - 1, num_draws, share) >= tail)
    return float(low), float(high)


def histogram(values: NDArray, num_bins: int, *, least: float | None = None) -> tuple[list[float], list[int]]:
    """Return edges (B + 1,) and counts (B,) of finite values (M,), starting at `least` if given."""
    low = float(values.min()) if least is None else least
    high = float(values.max())
    high = high if high > low else low + max(abs(low), 1.0) * 1e-3
    counts, edges = np.histogram(values, bins=num_bins, range=(low, math.nextafter(high, math.inf)))
    return edges.tolist(), counts.tolist()


_WORK = 1 << 20  # kernel values at once


def estimate_density(draws: NDArray, grid: NDArray) -> NDArray[np.float64] | None:
    """Estimate the density of draws (S,) at grid values (G,); None if all draws are equal."""
    values = np.asarray(draws, dtype=np.float64)
    low, high = np.quantile(values, [0.25, 0.75])
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    width = 0.9 * (min(spread, (high - low) / 1.34) or spread) * len(values) ** -0.2
    if not width > 1e-12 * max(1.0, float(np.abs(values).max())):
        return None
    total = np.zeros(len(grid))
    for part in np.array_split(values, max(1, -(-len(values) * len(grid) // _WORK))):
        total += np.exp(-0.5 * ((grid[:, None] - part) / width) ** 2).sum(axis=1)
    return np.asarray(total / (len(values) * width * np.sqrt(2 * np.pi)))


def density_grid(parts: list[NDArray], size: int) -> NDArray[np.float64]:
    """Return a grid (size,) that covers nearly all mass of the densities of several sets of draws, (S,) each."""
    ends = [(part.mean() - 3.5 * part.std(), part.mean() + 3.5 * part.std()) for part in parts]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return np.linspace(low, high, size)


def standardised_distances(reference: NDArray, others: Mapping[str, NDArray]) -> NDArray[np.float64]:
    """Return the largest distance of a mean from the reference mean per parameter, (P,), in reference standard deviations.

    Args:
        reference, others: draws (S, P).
    """
    mean, sd = reference.mean(axis=0, dtype=np.float64), reference.std(axis=0, dtype=np.float64)
    scale = np.where(sd > 0, sd, np.inf)
    found = [np.abs(draws.mean(axis=0, dtype=np.float64) - mean) / scale for draws in others.values()]
    return np.max(found, axis=0) if found else np.zeros(len(mean))


def quantile_indices(sizes: NDArray, shares: tuple[float, ...]) -> list[int]:
    """Return distinct parameter indices at given quantiles of the sizes (P,), where 1 is the largest."""
    order = np.argsort(sizes, kind="stable")
    places = [round(share * (len(order) - 1)) for share in shares]
    return list(dict.fromkeys(int(order[place]) for place in places))
