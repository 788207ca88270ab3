"""Scores of multi-label predictions: means over all decisions, and label by label.

A decision is whether an example has a label. Every example decides on every label, so macro and micro averages of
losses coincide; F1 scores and rankings have both. Means over labels skip labels for which the score is undefined and
report their number. Average precision and AUROC equal scikit-learn's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.label_statistics import THRESHOLD, decision_losses
from bnncli.evaluation.per_class import MOST_PROBABILITIES, RANKING_COST, areas_under_curves, of_every_class
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup, means

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
    found = [_counted(counted, probs, labels)]
    if probs.size > MOST_PROBABILITIES:
        reason = f"{probs.size} probabilities are more than the {MOST_PROBABILITIES} that can be ranked at once"
        return [*found, ScoreGroup(macro, None, reason), ScoreGroup(micro, None, reason)]
    return [*found, _ranked(macro, probs, labels), _pooled(micro, probs, labels)]


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


def _counted(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
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

    return ScoreGroup(members, statistic, per_class=of_every_class(shares, len(probs)))


def _ranked(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
    size, num_labels = probs.shape

    def areas(weights: NDArray) -> list[Floats]:
        """AUROC and average precision (b, L) per label; NaN for labels that no or all examples have."""
        found = np.full((2, len(weights), num_labels), np.nan)
        for k in range(num_labels):
            found[:, :, k] = areas_under_curves(np.asarray(probs[:, k]), np.asarray(labels[:, k]) != 0, weights)
        return list(found)

    def statistic(weights: NDArray) -> Floats:
        return np.stack([_means(part) for part in areas(weights)], axis=1)

    return ScoreGroup(members, statistic, cost=RANKING_COST * num_labels, per_class=of_every_class(areas, size))


def _pooled(members: list[ScoreForm], probs: NDArray, labels: NDArray) -> ScoreGroup:
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
