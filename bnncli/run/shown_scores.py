"""What commands that score show of their rows: the scores that were asked for, and what the numbers of the table mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bnncli.errors import DataError
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.scores import declared
from bnncli.likelihoods import recorded_name
from bnncli.names import percent
from bnncli.options.evaluate import EvaluateOptions
from bnncli.options.score import ScoreOptions

Row = dict[str, Any]


def legend(
    rows: Sequence[Row], options: EvaluateOptions | ScoreOptions, detectors: Sequence[str], replicates: int
) -> list[str]:
    """Return what the numbers of the table mean, in clauses.

    Args:
        detectors: the scores of examples by which detection is shown.
        replicates: of the bootstrap.
    """
    if options.metric:
        lines = [f"fractions, not percent; bins: {options.settings['bins']}"]
    else:
        lines = [f"scores are fractions, not percentages; ECE: {options.settings['bins']} equal-width bins"]
        if any("ood" in metric for row in rows for metric in row["metrics"]):
            whose = " (the same for all posteriors)" if [*detectors] == [DEFAULT_SCORE] else ""
            lines.append(f"detection by {', '.join(detectors)}{whose}")
    scores = declared()
    names = options.metric or [name for name, score in scores.items() if score.is_shown]
    metrics = [m for row in rows for m in row["metrics"] if m["value"] is not None and m["name"] in names]
    if any("floor" in metric and "reference" not in metric for metric in metrics):
        lines.append("floor: the value expected by chance for a calibrated model")
    if any(metric.get("p_value") is not None for metric in metrics):
        lines.append("MMD^2: unbiased, +- standard error (p: permutation test)")
    there = {metric["name"] for metric in metrics} if not options.metric else set()
    lines += [score.note for name, score in scores.items() if name in there and score.note is not None]
    if any(recorded_name(row) is not None for row in rows):
        lines.append(
            "multilabel: accuracy needs every label right; NLL, Brier and ECE are per label; class AUROC and average precision are "
            "means over labels"
        )
    if options.intervals:
        lines.append(
            f"[low, high]: {percent(options.level, 'g')} bootstrap intervals ({replicates} replicates); those of "
            "ECE and MCE exclude the floor and may be below the value"
        )
    return lines


def with_metrics(rows: Sequence[Row], names: Sequence[str], detectors: Sequence[str]) -> list[Row]:
    """The rows with the scores of these names alone.

    Args:
        detectors: the scores of examples by which detection is shown.

    Raises:
        DataError: one of them is undefined in all rows of a split.
    """
    kept = [{**row, "metrics": [m for m in row["metrics"] if m["name"] in names]} for row in rows]
    _check_defined(kept, names, detectors)
    return kept


def _check_defined(rows: Sequence[Row], names: Sequence[str], detectors: Sequence[str]) -> None:
    for split in dict.fromkeys(row["split"] for row in rows):
        for name in names:
            found = [m for row in rows if row["split"] == split for m in row["metrics"] if m["name"] == name]
            found = [m for m in found if m.get("score", detectors[0]) in detectors] or found
            if declared()[name].is_of_rule:  # it says nothing of the split that it was calibrated on
                found = [m for row in rows for m in row["metrics"] if m["name"] == name] or found
            if all(m["value"] is None for m in found):
                reason = found[0]["undefined"] if found else _why_absent(name, rows)
                raise DataError(f"\0metric\0 {name} is undefined on split {split!r}: {reason}", code="undefined_metric")


def _why_absent(name: str, rows: Sequence[Row]) -> str:
    """Why no row has a score."""
    score = declared()[name]
    makers = (score, *([declared()[score.computed_by]] if score.computed_by else []))
    is_of_split = any(one.of_split is not None for one in makers)
    if is_of_split:
        has_labels = any(recorded_name(row) is not None for row in rows)
        return "it does not support several labels per example" if has_labels else "it needs several labels per example"
    if any(one.of_reference is not None for one in makers):
        return "it needs predictions to compare with (\0reference\0)"
    if any(one.of_draws is not None for one in makers):
        return "it compares draws of weights, which predictions do not have"
    if score.is_of_rule:
        return "these predictions have no calibrated rule that it applies to"
    return "there is no out-of-distribution split"
