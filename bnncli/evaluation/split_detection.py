"""Metric rows of out-of-distribution detection: how well each score of an example tells two splits apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import DetectionForm, Ranking, Statistic

Row = dict[str, Any]
# Of each score its value (N,) for every example, or the reason why there is none.
ExampleScores = Mapping[str, NDArray | str]
# The forms of each score, by its name.
Forms = Mapping[str, Sequence[DetectionForm]]


def form_rows(forms: Forms) -> list[tuple[Row, DetectionForm]]:
    """Every form with its row, which has what defines it and no value."""
    return [
        ({"name": name, **form.choices, "higher_is_better": form.higher_is_better}, form)
        for name, own in forms.items()
        for form in own
    ]


def detection_rows(
    scores_in: ExampleScores,
    scores_out: ExampleScores,
    forms: Forms,
    *,
    split: str,
    ood: str,
    bootstrap: Bootstrap | None = None,
) -> list[Row]:
    """Rows of every form by every score of an example, between an in-distribution split and another one.

    Args:
        scores_in: name to (N,), higher for what looks in-distribution, or to the reason why there is no such score.
        scores_out: the same names, (M,).
        forms: of auroc, fpr95 and so on.
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
    defined = form_rows(forms)
    statistics = [form.statistic for _, form in defined]
    replicates = {} if bootstrap is None else _replicates(rankings, statistics, bootstrap, split=split, ood=ood)
    rows = []
    for name, reason in reasons.items():
        shared = {"score": name, "ood": ood, "n": _sizes(scores_in[name], scores_out[name])}
        if reason is not None:
            rows += [{**choices, **shared, "value": None, "undefined": reason} for choices, _ in defined]
            continue
        values = rankings[name].estimate(statistics)
        for index, ((choices, form), value) in enumerate(zip(defined, values, strict=True)):
            row = {**choices, **shared, "value": value}
            if bootstrap is not None:
                row |= bootstrap.describe(value, replicates[name][:, index], bounds=form.bounds)
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
    rankings: Mapping[str, Ranking], statistics: Sequence[Statistic], bootstrap: Bootstrap, *, split: str, ood: str
) -> dict[str, NDArray[np.float64]]:
    """The statistics (R, m) of each score, all under the same weights, which are drawn once."""
    if not rankings:
        return {}

    def statistic(*weights: NDArray) -> NDArray[np.float64]:
        return np.stack([ranking.evaluate(statistics, *weights) for ranking in rankings.values()], axis=1)

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
        return "the in-distribution split is empty"
    return f"only one class is present: split {ood} is empty" if len(scores_out) == 0 else None


def _sizes(scores_in: NDArray | str, scores_out: NDArray | str) -> list[int] | None:
    if isinstance(scores_in, str) or isinstance(scores_out, str):
        return None
    return [len(scores_in), len(scores_out)]
