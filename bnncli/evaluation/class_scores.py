"""Scores by class and by label, of top-k sets and of selective prediction, and the decomposition of two-class scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.statistics import (
    NO_LABELS,
    THRESHOLD,
    ExampleStatistics,
    Floats,
    ScoreForm,
    ScoreGroup,
    brier_losses,
    decision_losses,
    log_losses,
    means,
    row_blocks,
    total_weights,
)
from bnncli.lazy import sparse, special, torch
from bnncli.numerics.dirichlet import cumulative_lengths

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
    counts = _count_classes(counted, examples.predicted, examples.labels, num_classes=examples.num_classes)
    if probs.size > MOST_PROBABILITIES:
        reason = f"{probs.size} probabilities are more than the {MOST_PROBABILITIES} that can be ranked at once"
        return [counts, ScoreGroup(ranked, None, reason)]
    return [counts, _rank_classes(ranked, probs, examples.labels)]


def rare_classes(labels: NDArray, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the classes without examples among labels (N,), and those with fewer than 10, with their number in brackets."""
    counts = np.bincount(labels, minlength=len(names))
    absent = [name for name, count in zip(names, counts, strict=True) if count == 0]
    return absent, [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if 0 < count < FEW]


def _score(name: str) -> ScoreForm:
    reason = "no class has both positive and negative examples" if name.startswith("class_") else "undefined"
    return ScoreForm(name, _CHOICES, True, bounds=(0.0, 1.0), when_nan=reason)


def _count_classes(members: list[ScoreForm], predicted: NDArray, labels: NDArray, *, num_classes: int) -> ScoreGroup:
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

    return ScoreGroup(members, statistic, per_class=class_score_function(shares, size))


def _rank_classes(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
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

    return ScoreGroup(members, statistic, cost=RANKING_COST * num_classes, per_class=class_score_function(areas, size))


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


def class_score_function(
    shares: Callable[[NDArray], list[Floats]], size: int
) -> Callable[[], list[list[float | None]]]:
    """Return a function that computes every score per class with each example counted once; None if undefined."""

    def values() -> list[list[float | None]]:
        found = [part[0] for part in shares(np.ones((1, size)))]
        return [[None if np.isnan(value) else float(value) for value in part] for part in found]

    return values


_AT_ONCE = 1 << 22  # weights of pooled decisions at once


def decision_scores(probs: NDArray, examples: ExampleStatistics) -> list[ScoreGroup]:
    """Return accuracy (all labels right), Hamming loss, NLL (nats per label) and Brier score; the last three per label, too.

    Args:
        probs: (N, L), from which `examples` was computed; may be memory-mapped.
    """
    own = examples.of_labels
    assert own is not None
    whole = [ScoreForm("accuracy", {"labels": "all"}, True, bounds=(0.0, 1.0))]
    each = [
        ScoreForm("hamming_loss", {"threshold": THRESHOLD}, bounds=(0.0, 1.0)),
        ScoreForm("nll", {"reduction": "mean", "labels": "mean"}, facts={"num_clamped": own.num_clamped}),
        ScoreForm("brier", {"reduction": "mean", "labels": "mean"}, bounds=(0.0, 1.0)),
    ]
    if own.labels is None or own.num_wrong is None or own.log_loss is None or own.squared_error is None:
        return [ScoreGroup(whole, None, NO_LABELS), ScoreGroup(each, None, NO_LABELS)]
    columns = [own.num_wrong / examples.num_classes, own.log_loss, own.squared_error]
    labels = own.labels
    decisions = means(each, columns)

    def of_labels() -> list[list[float | None]]:
        totals = np.zeros((3, examples.num_classes))
        for rows in row_blocks(*probs.shape):
            block, known = np.asarray(probs[rows], dtype=np.float64), np.asarray(labels[rows]) != 0
            losses = decision_losses(block, known)[0]
            parts = ((block >= THRESHOLD) != known, losses, (block - known) ** 2)
            totals += np.stack([part.sum(axis=0) for part in parts])
        return [[float(value) for value in row] for row in totals / max(1, len(probs))]

    return [
        means(whole, [own.num_wrong == 0]),
        ScoreGroup(decisions.members, decisions.statistic, per_class=of_labels),
    ]


def label_by_label_scores(probs: NDArray, examples: ExampleStatistics) -> list[ScoreGroup]:
    """Return balanced accuracy, F1, precision, AUROC and average precision: means over labels, and of pooled decisions.

    Args:
        probs: (N, L), from which `examples` was computed; may be memory-mapped.
    """
    assert examples.of_labels is not None
    labels = examples.of_labels.labels
    counts = None if labels is None else (np.asarray(labels) != 0).sum(axis=0)
    told = 0 if counts is None else int(((counts == 0) | (counts == len(probs))).sum())
    macro = [_form(name, "macro", {"num_left_out": told}) for name in ("class_auroc", "class_average_precision")]
    micro = [_form(name, "micro") for name in ("class_auroc", "class_average_precision")]
    counted = [_form("balanced_accuracy", "macro", {"num_left_out": told})]
    absent = 0 if counts is None else int((counts == 0).sum())
    counted += [_form(name, "macro", {"num_left_out": absent}) for name in ("macro_f1", "macro_precision")]
    if labels is None:
        return [ScoreGroup(members, None, NO_LABELS) for members in (counted, macro, micro)]
    found = [_count_labels(counted, probs, labels)]
    if probs.size > MOST_PROBABILITIES:
        reason = f"{probs.size} probabilities are more than the {MOST_PROBABILITIES} that can be ranked at once"
        return [*found, ScoreGroup(macro, None, reason), ScoreGroup(micro, None, reason)]
    return [*found, _rank_labels(macro, probs, labels), _rank_decisions(micro, probs, labels)]


def one_sided_labels(labels: NDArray, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the labels (N, L) that no example has and those that every example has; neither can be ranked."""
    counts = labels.sum(axis=0)
    return (
        [name for name, count in zip(names, counts, strict=True) if count == 0],
        [name for name, count in zip(names, counts, strict=True) if count == len(labels)],
    )


def _form(name: str, average: str, facts: dict[str, int] | None = None) -> ScoreForm:
    reason = "no label is present in some examples and absent in others"
    choices = {"average": average, **({"classes": "present"} if average == "macro" else {})}
    return ScoreForm(name, choices, True, bounds=(0.0, 1.0), when_nan=reason, facts=facts or {})


def _means(values: Floats) -> Floats:
    """Return means (b,) over the defined labels of values (b, L); NaN if none is defined."""
    is_known = np.isfinite(values)
    total = np.where(is_known, values, 0.0).sum(axis=1)
    return np.divide(total, is_known.sum(axis=1), out=np.full(len(values), np.nan), where=is_known.any(axis=1))


def _count_labels(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
    known, said = np.asarray(labels) != 0, np.asarray(probs) >= THRESHOLD
    columns = np.concatenate([known, said, known & said], axis=1).astype(np.float32)

    def shares(weights: NDArray) -> list[Floats]:
        """Balanced accuracy, F1 and precision (b, L); NaN for absent labels, and, for the first, labels that all examples have."""
        found = (weights.astype(np.float64) @ columns).reshape(len(weights), 3, -1)
        is_there, is_said, is_both = found[:, 0], found[:, 1], found[:, 2]
        is_not = weights.sum(axis=1, dtype=np.float64)[:, None] - is_there
        undefined = np.where(is_there > 0, 0.0, np.nan)
        recall = is_both / np.maximum(is_there, 1)
        specificity = (is_not - (is_said - is_both)) / np.maximum(is_not, 1)
        balanced = np.where(is_not > 0, (recall + specificity) / 2, np.nan) + undefined
        f1 = 2 * is_both / np.maximum(is_there + is_said, 1) + undefined
        return [balanced, f1, is_both / np.maximum(is_said, 1) + undefined]

    def statistic(weights: NDArray) -> Floats:
        return np.stack([_means(part) for part in shares(weights)], axis=1)

    return ScoreGroup(members, statistic, per_class=class_score_function(shares, len(probs)))


def _rank_labels(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
    size, num_labels = probs.shape

    def areas(weights: NDArray) -> list[Floats]:
        """AUROC and average precision (b, L) per label; NaN for labels that no or all examples have."""
        found = np.full((2, len(weights), num_labels), np.nan)
        for k in range(num_labels):
            found[:, :, k] = areas_under_curves(np.asarray(probs[:, k]), np.asarray(labels[:, k]) != 0, weights)
        return list(found)

    def statistic(weights: NDArray) -> Floats:
        return np.stack([_means(part) for part in areas(weights)], axis=1)

    return ScoreGroup(members, statistic, cost=RANKING_COST * num_labels, per_class=class_score_function(areas, size))


def _rank_decisions(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
    """Rank all decisions together; each decision has the weight of its example."""
    num_labels = probs.shape[1]
    scores, is_there = np.asarray(probs).ravel(), np.asarray(labels).ravel() != 0

    def statistic(weights: NDArray) -> Floats:
        some = max(1, _AT_ONCE // max(1, probs.size))
        parts = [
            areas_under_curves(scores, is_there, np.repeat(weights[start : start + some], num_labels, axis=1))
            for start in range(0, len(weights), some)
        ]
        return np.concatenate(parts, axis=1).T

    return ScoreGroup(members, statistic, cost=RANKING_COST * num_labels)


NO_RANKING = "the predictions have no ranking; create one with predict \0top_k\0"


def ranking_scores(
    probs: NDArray, examples: ExampleStatistics, lengths: NDArray | None, choices: Mapping[str, Any] | None
) -> list[ScoreGroup]:
    """Return mean length and accuracy of the ranking, accuracy of the plain rule at that mean length, and the difference.

    Replicates keep the lengths of the sample.

    Args:
        probs: (N, C), from which `examples` was computed; may be memory-mapped.
        lengths: (N,) number of classes in the ranking, at least 1; None without a ranking.
        choices: rule, threshold and cap (largest length) of the ranking.
    """
    shared = dict(choices or {})
    length = [ScoreForm("ranked_length", shared, None)]
    accuracy = [
        ScoreForm("ranked_accuracy", shared, True, bounds=(0.0, 1.0)),
        ScoreForm("cumulative_accuracy", shared, True, bounds=(0.0, 1.0)),
        ScoreForm("ranked_gain", shared, True, bounds=(-1.0, 1.0)),
    ]
    if lengths is None:
        return [ScoreGroup(length, None, NO_RANKING), ScoreGroup(accuracy, None, NO_RANKING)]
    found = [means(length, [lengths])]
    if examples.label_rank is None:
        return [*found, ScoreGroup(accuracy, None, NO_LABELS)]
    most = min(int(shared["cap"]), examples.num_classes)
    plain = np.ones(0, dtype=np.int64)
    if len(lengths):
        largest = torch.from_numpy(largest_probabilities(probs, most))
        plain = cumulative_lengths(largest, mean_length=float(np.mean(lengths))).numpy()
    ours, theirs = examples.label_rank < lengths, examples.label_rank < plain
    return [*found, means(accuracy, [ours, theirs, ours.astype(float) - theirs])]


def largest_probabilities(probs: NDArray, count: int) -> Floats:
    """Return the `count` largest probabilities (N, count) of each row of probs (N, C), in descending order."""
    out = np.empty((len(probs), count))
    for rows in row_blocks(*probs.shape):
        out[rows] = -np.partition(-np.asarray(probs[rows]), range(count), axis=1)[:, :count]
    return out


def selective_scores(examples: ExampleStatistics) -> ScoreGroup:
    """Return AURC and E-AURC by the largest probability, in [0, 1]."""
    choices = {"score": "max_prob"}
    members = [ScoreForm(name, choices, bounds=(0.0, 1.0)) for name in ("aurc", "e_aurc")]
    if examples.is_right is None:
        return ScoreGroup(members, None, NO_LABELS)
    order = np.argsort(-examples.confidence, kind="stable")
    ordered, is_wrong = examples.confidence[order], ~examples.is_right[order]
    places = np.flatnonzero(is_wrong)
    # Groups of equal confidence that contain an error: begin, end and first error of each.
    starts, first = np.unique(np.searchsorted(-ordered, -ordered[places], side="left"), return_index=True)
    ends = np.searchsorted(-ordered, -ordered[starts], side="right")
    harmonics = [_harmonic(len(order))]

    def statistic(weights: NDArray) -> Floats:
        if len(places) == 0:
            return np.zeros((len(weights), 2))
        total = np.rint(total_weights(weights)).astype(np.int64)
        if total.max() >= len(harmonics[0]):  # whole groups that are large were drawn often
            harmonics[0] = _harmonic(2 * int(total.max()))
        harmonic = harmonics[0]
        # An error at position p adds 1/i to the curve at every i >= p: H_N - H_(p - 1); these sums give it for a group.
        summed = np.arange(len(harmonic)) * (harmonic - 1)
        errors = np.add.reduceat(weights[:, order[places]], first, axis=1).astype(np.float64)
        before, after = _cumulative(weights[:, order], starts, ends)
        size = after - before
        areas = size * harmonic[total][:, None] - summed[after] + summed[before]
        area = (errors * areas / np.maximum(size, 1)).sum(axis=1) / total
        num_errors = np.rint(errors.sum(axis=1)).astype(np.int64)
        num_right = total - num_errors
        best = (num_errors - num_right * (harmonic[total] - harmonic[num_right])) / total
        return np.stack([area, np.maximum(0.0, area - best)], axis=1)

    return ScoreGroup(members, statistic)


def _harmonic(largest: int) -> Floats:
    """Return the harmonic numbers H_0 to H_largest."""
    found = special.digamma(np.arange(1, largest + 2)) + np.euler_gamma
    found[0] = 0.0
    return found


def _cumulative(weights: NDArray, starts: NDArray, ends: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sums (b, J) of integer weights (b, N) before each start and before each end."""
    num_examples = weights.shape[1]
    edges = np.sort(np.concatenate([[0], starts, ends[ends < num_examples]]), kind="stable")  # ascending parts: a merge
    edges = edges[np.append(True, np.diff(edges) > 0)]  # distinct, since reduceat sums what is between neighbours
    sums = np.zeros((len(weights), len(edges) + 1), dtype=np.int64)
    sums[:, 1:] = np.cumsum(np.rint(np.add.reduceat(weights, edges, axis=1)).astype(np.int64), axis=1)
    places = np.append(edges, num_examples)
    return sums[:, np.searchsorted(places, starts)], sums[:, np.searchsorted(places, ends)]


_COST = 4.0  # relative to a mean, measured


def decomposition_scores(examples: ExampleStatistics) -> ScoreGroup:
    """Return miscalibration, discrimination and uncertainty of the Brier score and of the NLL (nats).

    The score is miscalibration - discrimination + uncertainty.
    """
    members = [
        ScoreForm(name, {"of": of, "method": "CORP"}, higher, method=method)
        for of in ("brier", "nll")
        for name, higher, method in (
            ("miscalibration", False, "basic"),
            ("discrimination", True, "basic"),
            ("uncertainty", None, "percentile"),
        )
    ]
    if examples.num_classes != 2:
        return ScoreGroup(members, None, f"expected two classes, got {examples.num_classes}")
    if examples.labels is None or examples.label_probability is None:
        return ScoreGroup(members, None, NO_LABELS)
    # Not from the label's probability: 1 - p rounds, so equal forecasts would differ by label.
    forecast = np.where(examples.predicted == 1, examples.confidence, 1 - examples.confidence)
    order = np.argsort(forecast, kind="stable")
    _, starts = np.unique(forecast[order], return_index=True)
    is_one = examples.labels[order] == 1
    losses = np.stack([brier_losses(examples), log_losses(examples.label_probability)], axis=1)

    def statistic(weights: NDArray) -> Floats:
        weights = weights.astype(np.float64)
        sorted_weights = weights[:, order]
        count = np.add.reduceat(sorted_weights, starts, axis=1)
        ones = np.add.reduceat(sorted_weights * is_one, starts, axis=1)
        recalibrated = np.stack([_recalibrated_losses(*row) for row in zip(count, ones, strict=True)])
        total = total_weights(weights)
        score, uncertainty = weights @ losses / total[:, None], _uncertainty(ones.sum(axis=1) / total)
        parts = [score - recalibrated, uncertainty - recalibrated, uncertainty]
        return np.maximum(0.0, np.stack(parts, axis=2)).reshape(len(weights), -1)

    return ScoreGroup(members, statistic, cost=_COST)


def _recalibrated_losses(count: Floats, ones: Floats) -> Floats:
    """Return Brier score (summed over both classes) and NLL (2,) of the isotonic regression of labels grouped by forecast."""
    from sklearn.isotonic import isotonic_regression  # slow to import

    is_there = count > 0
    count, ones = count[is_there], ones[is_there]
    fitted = cast(Floats, isotonic_regression(ones / count, sample_weight=count, y_min=0.0, y_max=1.0))
    zeros = count - ones
    brier = 2 * np.sum(ones * (1 - fitted) ** 2 + zeros * fitted**2)
    log_loss = -np.sum(special.xlogy(ones, fitted) + special.xlogy(zeros, 1 - fitted))
    return np.array([brier, log_loss]) / count.sum()


def _uncertainty(share: Floats) -> Floats:
    """Return Brier score and NLL (b, 2) of forecasting the share (b,) of class 1 for every example."""
    return np.stack(
        [2 * share * (1 - share), -special.xlogy(share, share) - special.xlogy(1 - share, 1 - share)], axis=1
    )
