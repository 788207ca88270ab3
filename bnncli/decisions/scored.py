"""Score decisions on a split, in the form of all other scores so that they share one bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions.prediction_sets import SetRule
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup, means

_SHARE = (0.0, 1.0)


def set_scores(
    rule: SetRule, probs: NDArray, labels: NDArray | None, uniform: NDArray | None, choices: dict[str, Any]
) -> list[ScoreGroup]:
    """Return coverage, worst-class coverage, mean set size, and the shares of empty and of singleton sets."""
    size, covered = np.empty(len(probs), dtype=np.int64), np.zeros(len(probs), dtype=bool)
    for rows, sets in rule.set_blocks(probs, uniform):
        size[rows] = sets.sum(axis=1)
        if labels is not None:
            covered[rows] = np.take_along_axis(sets, np.asarray(labels[rows], dtype=np.int64)[:, None], axis=1)[:, 0]
    coverage = ScoreForm("set_coverage", choices, None, bounds=_SHARE)
    worst = ScoreForm("worst_class_coverage", choices, True, bounds=_SHARE)
    sizes = [
        ScoreForm("set_size", choices, False, bounds=(0.0, float(probs.shape[1]))),
        ScoreForm("empty_sets", choices, None, bounds=_SHARE),
        ScoreForm("singleton_sets", choices, True, bounds=_SHARE),
    ]
    found = [means(sizes, [size, size == 0, size == 1])]
    if labels is None:
        return [ScoreGroup([coverage, worst], None, NO_LABELS), *found]
    return [means([coverage], [covered]), _worst_class(worst, covered, labels), *found]


def _worst_class(form: ScoreForm, covered: NDArray, labels: NDArray) -> ScoreGroup:
    """Return the lowest coverage over the classes that occur."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(np.asarray(labels)[order], prepend=-1))
    is_covered = covered[order].astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        ordered = weights[:, order].astype(np.float64)
        counts = np.add.reduceat(ordered, starts, axis=1)
        shares = np.add.reduceat(ordered * is_covered, starts, axis=1) / np.maximum(counts, 1)
        found: Floats = np.where(counts > 0, shares, np.inf).min(axis=1, keepdims=True)
        return found

    return ScoreGroup([form], statistic, cost=3.0)


def acceptance_scores(accepted: NDArray, is_right: NDArray | None, choices: dict[str, Any]) -> list[ScoreGroup]:
    """Return the share of accepted predictions (N,) and the share of wrong predictions among them."""
    share = means([ScoreForm("acceptance", choices, True, bounds=_SHARE)], [accepted])
    form = ScoreForm("selective_risk", choices, False, bounds=_SHARE, when_nan="no predictions are accepted")
    if is_right is None:
        return [share, ScoreGroup([form], None, NO_LABELS)]
    columns = np.stack([accepted & ~np.asarray(is_right, dtype=bool), accepted], axis=1).astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        wrong, count = (weights.astype(np.float64) @ columns).T
        return np.where(count > 0, wrong / np.maximum(count, 1), np.nan)[:, None]

    return [share, ScoreGroup([form], statistic)]


def alarm_scores(is_outlier: NDArray, choices: dict[str, Any], *, is_ood: bool) -> list[ScoreGroup]:
    """Return the share of examples (N,) flagged as outliers: detection rate on an OOD split, false-alarm rate otherwise."""
    name = "detection_rate" if is_ood else "false_alarm_rate"
    return [means([ScoreForm(name, choices, is_ood, bounds=_SHARE)], [is_outlier])]
