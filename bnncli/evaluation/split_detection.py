"""Metric rows of out-of-distribution detection: AUROC, AUPR and FPR95 of each score, with what defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import Detection, Ranking

Row = dict[str, Any]
Scores = Mapping[str, NDArray | str]

_IN_THRESHOLD = "5th percentile of in-distribution scores, linear"
_OUT_THRESHOLD = "95th percentile of out-of-distribution scores, linear"
# Field of Detection to the row's name and choices.
DETECTION_ROWS: dict[str, Row] = {
    "auroc": {"name": "auroc", "positive": "in", "higher_is_better": True},
    "aupr_in": {"name": "aupr", "positive": "in", "estimator": "average precision", "higher_is_better": True},
    "aupr_out": {"name": "aupr", "positive": "out", "estimator": "average precision", "higher_is_better": True},
    "fpr95_in": {"name": "fpr95", "positive": "in", "threshold": _IN_THRESHOLD, "higher_is_better": False},
    "fpr95_out": {"name": "fpr95", "positive": "out", "threshold": _OUT_THRESHOLD, "higher_is_better": False},
}


def detection_rows(
    scores_in: Scores, scores_out: Scores, *, split: str, ood: str, bootstrap: Bootstrap | None = None
) -> list[Row]:
    """Rows of auroc, aupr and fpr95 of every score, between an in-distribution split and another one.

    Args:
        scores_in: name to (N,), higher for what looks in-distribution, or to the reason why there is no such score.
        scores_out: the same names, (M,).
        split, ood: names of the two splits; each is resampled on its own.
        bootstrap: None for rows without standard errors.

    Raises:
        DataError: scores that are not finite.
    """
    reasons = {name: _why_undefined(scores_in[name], scores_out[name], ood) for name in scores_in}
    rankings = {
        name: Ranking(np.asarray(scores_in[name]), np.asarray(scores_out[name]))
        for name, reason in reasons.items()
        if reason is None
    }
    replicates = {} if bootstrap is None else _replicates(rankings, bootstrap, split=split, ood=ood)
    rows = []
    for name, reason in reasons.items():
        shared = {"score": name, "ood": ood, "n": _sizes(scores_in[name], scores_out[name])}
        if reason is not None:
            rows += [{**choices, **shared, "value": None, "undefined": reason} for choices in DETECTION_ROWS.values()]
            continue
        for index, (field, value) in enumerate(rankings[name].estimate().items()):
            row = {**DETECTION_ROWS[field], **shared, "value": value}
            if bootstrap is not None:
                row |= bootstrap.describe(value, replicates[name][:, index], bounds=(0.0, 1.0))
            rows.append(row)
    return rows


def mmc_row(confidence: NDArray, *, ood: str, bootstrap: Bootstrap | None = None) -> Row:
    """The row of the mean maximum confidence of an out-of-distribution split; confidence (M,)."""
    row: Row = {"name": "mmc", "ood": ood, "n": len(confidence), "higher_is_better": False}
    if len(confidence) == 0:
        return row | {"value": None, "undefined": f"split {ood} is empty"}
    row["value"] = float(np.mean(confidence, dtype=np.float64))
    if bootstrap is not None:
        values = np.asarray(confidence, dtype=np.float32)
        found = bootstrap.replicates(lambda weights: (weights @ values) / len(values), (ood, len(values)))
        row |= bootstrap.describe(row["value"], found, bounds=(0.0, 1.0))
    return row


def _replicates(
    rankings: Mapping[str, Ranking], bootstrap: Bootstrap, *, split: str, ood: str
) -> dict[str, NDArray[np.float64]]:
    """The fields of Detection (R, 5) of each score, all under the same weights, which are drawn once."""
    if not rankings:
        return {}

    def statistic(weights_in: NDArray, weights_out: NDArray) -> NDArray[np.float64]:
        found: list[Detection] = [ranking.evaluate(weights_in, weights_out) for ranking in rankings.values()]
        return np.stack([np.stack(scores, axis=1) for scores in found], axis=1)

    first = next(iter(rankings.values()))
    sizes = (split, len(first.scores_in)), (ood, len(first.scores_out))
    values = bootstrap.replicates(statistic, *sizes)
    return {name: values[:, index] for index, name in enumerate(rankings)}


def _why_undefined(scores_in: NDArray | str, scores_out: NDArray | str, ood: str) -> str | None:
    """The reason why there is no detection, or None."""
    for scores in (scores_in, scores_out):
        if isinstance(scores, str):
            return scores
    if len(scores_in) == 0:
        return "empty in-distribution split"
    return f"only one class present: split {ood} is empty" if len(scores_out) == 0 else None


def _sizes(scores_in: NDArray | str, scores_out: NDArray | str) -> list[int] | None:
    if isinstance(scores_in, str) or isinstance(scores_out, str):
        return None
    return [len(scores_in), len(scores_out)]
