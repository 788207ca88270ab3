"""Macro-averaged scores, which weight every class equally: recall, precision, F1 and rankings.

Means are over the classes that occur among the labels, as in scikit-learn's balanced accuracy. A class that is never
predicted has no precision and enters the mean as 0. Rankings order examples by the probability of a class, its own
examples against all others. Average precision equals scikit-learn's, where tied probabilities are one threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup
from bnncli.lazy import sparse

MOST_PROBABILITIES = 1 << 25  # limit for ranking: 128 MB
FEW = 10  # a class with fewer examples has unreliable scores of its own
RANKING_COST = 40.0  # operations per example, class and replicate
_CHOICES = {"average": "macro", "classes": "present"}


def per_class_scores(probs: NDArray, examples: ExampleStatistics) -> list[ScoreGroup]:
    """Return balanced accuracy, macro F1 and precision; macro AUROC and average precision, one class against the rest.

    Args:
        probs: (N, C), from which `examples` was computed; may be memory-mapped.
    """
    counted = [_score(name) for name in ("balanced_accuracy", "macro_f1", "macro_precision")]
    ranked = [_score(name) for name in ("class_auroc", "class_average_precision")]
    if examples.labels is None:
        return [ScoreGroup(counted, None, NO_LABELS), ScoreGroup(ranked, None, NO_LABELS)]
    counts = _counted(counted, examples.predicted, examples.labels, num_classes=examples.num_classes)
    if probs.size > MOST_PROBABILITIES:
        reason = f"{probs.size} probabilities are more than the {MOST_PROBABILITIES} that can be ranked at once"
        return [counts, ScoreGroup(ranked, None, reason)]
    return [counts, _ranked(ranked, probs, examples.labels)]


def rare_classes(labels: NDArray, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the classes without examples among labels (N,), and those with fewer than 10, with their number in brackets."""
    counts = np.bincount(labels, minlength=len(names))
    absent = [name for name, count in zip(names, counts, strict=True) if count == 0]
    return absent, [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if 0 < count < FEW]


def _score(name: str) -> ScoreForm:
    reason = "no class has both positive and negative examples" if name.startswith("class_") else "undefined"
    return ScoreForm(name, _CHOICES, True, bounds=(0.0, 1.0), when_nan=reason)


def _counted(members: list[ScoreForm], predicted: NDArray, labels: NDArray, *, num_classes: int) -> ScoreGroup:
    size = len(labels)
    right = labels[predicted == labels]

    @cache
    def counter() -> sparse.csr_array:
        """Indicator matrix (3 C, N) of label, predicted class and correct class."""
        columns = np.concatenate([labels, predicted + num_classes, right + 2 * num_classes])
        rows = np.concatenate([np.tile(np.arange(size), 2), np.flatnonzero(predicted == labels)])
        return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(size, 3 * num_classes)).T.tocsr()

    def shares(weights: NDArray) -> list[Floats]:
        """Recall, F1 and precision, (b, C) each; NaN for classes without labels, for precision also without predictions."""
        if _is_each_once(weights):
            found = np.stack([np.bincount(part, minlength=num_classes) for part in (labels, predicted, right)])[None]
        else:
            found = (counter() @ weights.T.astype(np.float64)).T.reshape(len(weights), 3, num_classes)
        is_label, is_predicted, is_right = found[:, 0], found[:, 1], found[:, 2]
        absent = np.where(is_label > 0, 0.0, np.nan)
        recall = is_right / np.maximum(is_label, 1) + absent
        return [recall, 2 * is_right / np.maximum(is_label + is_predicted, 1) + absent,
                np.where(is_predicted > 0, is_right / np.maximum(is_predicted, 1), np.nan) + absent]  # fmt: skip

    def statistic(weights: NDArray) -> Floats:
        recall, f1, precision = shares(weights)
        precision = np.where(np.isnan(recall), np.nan, np.nan_to_num(precision))
        return np.stack([np.nanmean(values, axis=1) for values in (recall, f1, precision)], axis=1)

    return ScoreGroup(members, statistic, per_class=of_every_class(shares, size))


def _ranked(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
    size, num_classes = probs.shape
    present = np.unique(labels)

    @cache
    def areas_of_all() -> list[Floats]:
        return computed(np.ones((1, size)))

    def areas(weights: NDArray) -> list[Floats]:
        """AUROC and average precision (b, C); NaN for a class that no or all examples have."""
        # Sorting dominates the cost; the unweighted result is shared by the mean and the classes.
        return areas_of_all() if _is_each_once(weights) else computed(weights)

    def computed(weights: NDArray) -> list[Floats]:
        values = np.asarray(probs)
        found = np.full((2, len(weights), num_classes), np.nan)
        for k in present:
            found[:, :, k] = areas_under_curves(values[:, k], labels == k, weights)
        return list(found)

    def statistic(weights: NDArray) -> Floats:
        parts = areas(weights)
        known = [np.isfinite(values) for values in parts]
        count = [np.maximum(is_known.sum(axis=1), 1) for is_known in known]
        means = [np.nansum(values, axis=1) / n for values, n in zip(parts, count, strict=True)]
        none = [~is_known.any(axis=1) for is_known in known]
        return np.stack([np.where(lacks, np.nan, mean) for lacks, mean in zip(none, means, strict=True)], axis=1)

    return ScoreGroup(members, statistic, cost=RANKING_COST * num_classes, per_class=of_every_class(areas, size))


def areas_under_curves(scores: NDArray, is_positive: NDArray, weights: NDArray) -> Floats:
    """Return AUROC and average precision (2, b) of scores (N,) under weights (b, N); NaN if a side has no weight."""
    if _is_each_once(weights):
        return _areas_of_each_once(scores, is_positive)[:, None]
    order = np.argsort(-scores)  # ties in any order: integer sums are exact
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # end of each group of tied scores
    places = np.flatnonzero(is_positive[order])
    if len(places) in (0, len(scores)):
        return np.full((2, len(weights)), np.nan)
    # Only scores that positives have contribute, mostly few.
    ties = np.searchsorted(ends, places)
    starts = np.flatnonzero(np.append(True, np.diff(ties) != 0))
    chosen = ties[starts]
    until, before = ends[chosen] + 1, np.where(chosen > 0, ends[chosen - 1] + 1, 0)
    sums = np.zeros((len(weights), len(scores) + 1))
    np.cumsum(weights.take(order, axis=1), axis=1, out=sums[:, 1:], dtype=np.float64)
    gained = np.add.reduceat(weights.take(order[places], axis=1), starts, axis=1, dtype=np.float64)
    found, total = gained.cumsum(axis=1), sums.take(until, axis=1)
    tied = total - sums.take(before, axis=1) - gained  # negatives
    positives = found[:, -1]
    negatives = sums[:, -1] - positives
    pairs = (gained * (negatives[:, None] - (total - found) + tied / 2)).sum(axis=1)
    precision = (gained * found / np.maximum(total, 1)).sum(axis=1)
    is_defined = (positives > 0) & (negatives > 0)
    sizes = np.maximum(positives * negatives, 1), np.maximum(positives, 1)
    return np.stack([np.where(is_defined, part / n, np.nan) for part, n in zip((pairs, precision), sizes, strict=True)])


def _areas_of_each_once(scores: NDArray, is_positive: NDArray) -> Floats:
    """Return areas_under_curves with every example counted once, (2,), from counts at the scores of the positives."""
    every, positive = np.sort(scores), np.sort(scores[is_positive])
    if len(positive) in (0, len(every)):
        return np.full(2, np.nan)
    starts = np.flatnonzero(np.append(True, np.diff(positive) != 0))  # start of each group of tied scores
    gained = np.diff(starts, append=len(positive))
    found = len(positive) - starts  # positives that score at least as high
    below, until = (np.searchsorted(every, positive[starts], side=side) for side in ("left", "right"))
    tied = until - below - gained  # negatives
    pairs = (gained * (below - starts + tied / 2)).sum()
    precision = (gained * found / (len(every) - below)).sum()
    return np.array([pairs / (len(positive) * (len(every) - len(positive))), precision / len(positive)])


def _is_each_once(weights: NDArray) -> bool:
    return len(weights) == 1 and bool((weights == 1).all())


def of_every_class(shares: Callable[[NDArray], list[Floats]], size: int) -> Callable[[], list[list[float | None]]]:
    """Return a function that computes every score per class with each example counted once; None if undefined."""

    def values() -> list[list[float | None]]:
        found = [part[0] for part in shares(np.ones((1, size)))]
        return [[None if np.isnan(value) else float(value) for value in part] for part in found]

    return values
