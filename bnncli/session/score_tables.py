"""Build tables of scores: one row per split, posterior and integrator, and one per class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.scores import all_scores
from bnncli.evaluation.statistics import Row
from bnncli.likelihoods import read_recorded_name
from bnncli.names import percent, posterior_title
from bnncli.options.scoring import EvaluateOptions, ScoreOptions
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Table
from bnncli.session.score_rows import PredictedSplit

FEW_GROUPS = 30  # with fewer, intervals of 90% held the truth in 73 to 86% of simulations
_FIRST_COLUMNS = ("split", "posterior", "integrator", "draws")

Form = tuple[str, str | None, tuple[str | None, ...]]
Head = Callable[[Mapping[str, Any]], list[str]]  # maps a row of scores to the first cells of a table row


def score_table(
    rows: Sequence[Mapping[str, Any]],
    notes: list[str],
    *,
    chosen: Sequence[str] = (),
    scores: Sequence[str] = (DEFAULT_SCORE,),
    intervals: bool = False,
    first: Sequence[str] = _FIRST_COLUMNS,
    head: Head | None = None,
) -> Table:
    """Return the rows of evaluate as a Table; undefined scores are dashes.

    Args:
        chosen: names of scores to show in all forms; empty for the usual ones.
        scores: detection scores to show.
        intervals: whether to show the interval of each score.
        first: titles of the columns before the scores, at least three; the first is the split.
        head: returns the cells of these columns; None for the names of a run's predictions.
    """
    ordered = sorted(rows, key=lambda row: (row["split"] != "test", row["split"]))
    shown = [_select_shown(row, chosen, scores) for row in ordered]
    forms = _columns(shown)
    cells = [
        [*(head or run_head)(row), *(_cell(found.get(form), intervals) for form in forms)]
        for row, found in zip(ordered, shown, strict=True)
    ]
    columns = [*first, *_titles(forms, shown)]
    return Table(columns, cells, notes=notes, narrow=_transpose_table(columns, cells))


class ScoreColumn(NamedTuple):
    """A table column: title, which direction is better, and its metric in each row or None."""

    title: str
    higher_is_better: bool | None
    metrics: list[Mapping[str, Any] | None]


def build_score_columns(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[str] = (DEFAULT_SCORE,)
) -> list[ScoreColumn]:
    """Return the usual scores of evaluate's rows in table order.

    Args:
        scores: detection scores to show.
    """
    shown = [_select_shown(row, (), scores) for row in rows]
    forms = _columns(shown)
    found = []
    for form, title in zip(forms, _titles(forms, shown), strict=True):
        metrics = [own.get(form) for own in shown]
        first = next(metric for metric in metrics if metric is not None)
        found.append(ScoreColumn(title, first["higher_is_better"], metrics))
    return found


def score_title(metric: Mapping[str, Any]) -> str:
    """Return a score's title in a table, without the choices that distinguish its forms."""
    return all_scores()[metric["name"]].title.format(**metric)


def _select_shown(
    row: Mapping[str, Any], chosen: Sequence[str], scores: Sequence[str]
) -> dict[Form, Mapping[str, Any]]:
    """Return the scores to show from a row, by form."""
    has_labels = read_recorded_name(row) is not None
    return {_form(m): m for m in row["metrics"] if _is_shown(m, chosen, scores, has_labels=has_labels)}


def _is_shown(metric: Mapping[str, Any], chosen: Sequence[str], scores: Sequence[str], *, has_labels: bool) -> bool:
    if "ood" in metric and metric.get("score", scores[0]) not in scores:  # AURC has its own score
        return False
    if chosen:
        return metric["name"] in chosen
    score = all_scores()[metric["name"]]
    if has_labels and score.shown_of_labels is not None:
        return all(metric.get(key) == value for key, value in score.shown_of_labels.items())
    return score.is_shown and all(metric.get(key) == value for key, value in score.usual.items())


def _form(metric: Mapping[str, Any]) -> Form:
    """Return a metric's identity across rows: name, other split and the choices that distinguish its forms."""
    return metric["name"], metric.get("ood"), tuple(metric.get(key) for key in all_scores()[metric["name"]].told_by)


def _columns(shown: Sequence[Mapping[Form, Any]]) -> list[Form]:
    """Return all forms in the order of the scores, grouped by other split."""
    forms = list(dict.fromkeys(form for found in shown for form in found))
    others = list(dict.fromkeys(ood for _, ood, _ in forms))
    rank = list(all_scores()).index
    first = min((rank(name) for name, ood, _ in forms if ood is not None), default=0)

    def place(form: Form) -> tuple[int, int, int]:
        name, ood, _ = form
        return (rank(name), 0, 0) if ood is None else (first, others.index(ood), rank(name))

    return sorted(forms, key=place)


def _titles(forms: Sequence[Form], shown: Sequence[Mapping[Form, Any]]) -> list[str]:
    """Return the title of each form: its score, the other split and the choices that distinguish it."""
    titles = []
    for form in forms:
        name, ood, choices = form
        example = next(found[form] for found in shown if form in found)
        like = [others for other, _, others in forms if other == name]
        telling = [text for i, text in enumerate(choices) if text is not None and len({o[i] for o in like}) > 1]
        titles.append(" ".join([score_title(example), *([ood] if ood else []), *telling]))
    return titles


def _transpose_table(columns: list[str], cells: list[list[str]]) -> list[Table]:
    """Return narrow tables of the same numbers: one per split, with a row per score."""
    tables = []
    for split in dict.fromkeys(row[0] for row in cells):
        chosen = [row for row in cells if row[0] == split]
        scores = [[name, *(row[i] for row in chosen)] for i, name in enumerate(columns) if i >= 3]
        tables.append(Table([split, *(f"{row[1]} {row[2]}" for row in chosen)], scores))
    return tables


def run_head(row: Mapping[str, Any]) -> list[str]:
    """Return split, posterior, integrator and number of draws."""
    title = posterior_title(row["posterior"], row["variant"], row.get("name"))
    return [row["split"], title, row["variant"], "-" if row["samples"] is None else str(row["samples"])]


def _cell(metric: Mapping[str, Any] | None, intervals: bool) -> str:
    if metric is None or metric["value"] is None:
        return "-"
    digits = all_scores()[metric["name"]].digits
    shown, ends = number_text(metric["value"], digits), metric.get("interval")
    if metric.get("floor") is not None:
        shown += f" (floor {number_text(metric['floor'], digits)})"
    if metric.get("p_value") is not None:  # of a distance
        shown += f" +- {number_text(metric['standard_error'], digits)} (p {metric['p_value']:.2g})"
    if not intervals or ends is None:
        return shown
    return f"{shown} [{number_text(ends['low'], digits)}, {number_text(ends['high'], digits)}]"


def number_text(value: float, digits: int) -> str:
    """Format a number with this many decimals."""
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0


TableRow = Mapping[str, Any]
_FIRST_CLASS_COLUMNS = ("split", "posterior", "integrator")
_OF_ALL = ("macro ", "class ")  # title prefixes of means over classes


def add_class_counts(rows: Sequence[TableRow], groups: Sequence[PredictionGroup]) -> list[dict[str, Any]]:
    """Add `classes` and `class_counts` (examples per class, None without labels) to the rows."""
    found = {}
    for name, header in {name: one for group in groups for name, one in group.splits(is_ood=False).items()}.items():
        file = PredictedSplit(header).file
        found[name] = class_facts(file.labels, file.classes)
    return [
        {**row, **found[row["split"]]} if any("per_class" in m for m in row["metrics"]) else {**row} for row in rows
    ]


def drop_class_values(row: TableRow) -> dict[str, Any]:
    """Return the row without per-class values."""
    metrics = [{key: value for key, value in metric.items() if key != "per_class"} for metric in row["metrics"]]
    return {**row, "metrics": metrics}


def class_facts(labels: NDArray | None, classes: Sequence[str]) -> dict[str, Any]:
    """Return `classes` and `class_counts` for a row with per-class scores."""
    if labels is None:
        return {"classes": list(classes), "class_counts": None}
    own = np.asarray(labels)
    counts = own.sum(axis=0) if own.ndim == 2 else np.bincount(own, minlength=len(classes))
    return {"classes": list(classes), "class_counts": counts.tolist()}


def class_table(
    rows: Sequence[TableRow], *, first: Sequence[str] = _FIRST_CLASS_COLUMNS, head: Head = run_head
) -> Table | None:
    """Return the table of per-class scores; None without any. `first` (three columns) and `head` as for score_table."""
    told = [row for row in rows if "classes" in row]
    if not told:
        return None
    ordered = sorted(told, key=lambda row: (row["split"] != "test", row["split"]))
    titles = list(dict.fromkeys(_title(row, metric) for row in ordered for metric in _select_per_class(row)))
    cells = [cell for row in ordered for cell in _cells(row, titles, head)]
    what = "class" if read_recorded_name(ordered[0]) is None else "label"
    return Table([*first, what, "examples", *titles], cells)


def _select_per_class(row: TableRow) -> list[TableRow]:
    return [metric for metric in row["metrics"] if metric.get("per_class") is not None]


def _title(row: TableRow, metric: TableRow) -> str:
    """Return the title of a per-class score; the terms of balanced accuracy are recalls."""
    if metric["name"] == "balanced_accuracy" and read_recorded_name(row) is None:
        return "recall"
    title = score_title(metric)
    for words in _OF_ALL:
        title = title.removeprefix(words)
    return title


def _cells(row: TableRow, titles: Sequence[str], head: Head) -> list[list[str]]:
    by_title = {_title(row, metric): metric for metric in _select_per_class(row)}
    found = []
    for k, name in enumerate(row["classes"]):
        count = "-" if row["class_counts"] is None else str(row["class_counts"][k])
        scores = [_score(by_title.get(one), k) for one in titles]
        found.append([*head(row)[:3], name, count, *scores])
    return found


def _score(metric: TableRow | None, k: int) -> str:
    value = None if metric is None else metric["per_class"][k]
    return "-" if metric is None or value is None else number_text(value, all_scores()[metric["name"]].digits)


def legend(
    rows: Sequence[Row], options: EvaluateOptions | ScoreOptions, detectors: Sequence[str], replicates: int
) -> list[str]:
    """Return the legend of a table, in clauses.

    Args:
        detectors: detection scores shown.
        replicates: of the bootstrap.
    """
    if options.metric:
        lines = [f"fractions, not percent; bins: {options.settings['bins']}"]
    else:
        lines = [f"scores are fractions, not percentages; ECE: {options.settings['bins']} equal-width bins"]
        if any("ood" in metric for row in rows for metric in row["metrics"]):
            whose = " (the same for all posteriors)" if [*detectors] == [DEFAULT_SCORE] else ""
            lines.append(f"detection by {', '.join(detectors)}{whose}")
    scores = all_scores()
    names = options.metric or [name for name, score in scores.items() if score.is_shown]
    metrics = [m for row in rows for m in row["metrics"] if m["value"] is not None and m["name"] in names]
    if any(metric.get("floor") is not None and "reference" not in metric for metric in metrics):
        lines.append("floor: the value expected by chance for a calibrated model")
    if any(metric.get("p_value") is not None for metric in metrics):
        lines.append("MMD^2: unbiased, +- standard error (p: permutation test)")
    there = {metric["name"] for metric in metrics} if not options.metric else set()
    lines += [score.note for name, score in scores.items() if name in there and score.note is not None]
    if any(read_recorded_name(row) is not None for row in rows):
        lines.append(
            "multilabel: accuracy needs every label right; NLL, Brier and ECE are per label; class AUROC and average precision are "
            "means over labels"
        )
    if options.intervals:
        lines.append(
            f"[low, high]: {percent(options.level, 'g')} bootstrap intervals ({replicates} replicates); those of "
            "ECE and MCE exclude the floor and may be below the value"
        )
        lines += _describe_resampling(rows)
    return lines


def _describe_resampling(rows: Sequence[Row]) -> list[str]:
    """Return what the intervals resample where that is not all examples, and which splits have too little for intervals."""
    own = [(row["split"], m) for row in rows for m in row["metrics"] if m["value"] is not None and "ood" not in m]
    lines = []
    for field, what in (("num_groups", "whole groups: {}"), ("num_resampled", "a random part: {} examples")):
        counts = {split: m["interval"][field] for split, m in own if field in (m.get("interval") or {})}
        if counts:
            named = ", ".join(f"{split} has {count:,}" for split, count in counts.items())
            is_narrow = field == "num_groups" and min(counts.values()) < FEW_GROUPS
            narrow = f" (below {FEW_GROUPS} groups, they are too narrow)" if is_narrow else ""
            lines.append(f"intervals resample {what.format(named)}{narrow}")
    resampled = {split for split, m in own if m.get("interval")}
    without = [split for split in dict.fromkeys(split for split, _ in own) if split not in resampled]
    return [*lines, *(f"no intervals for {split}: its rows are a single group or example" for split in without)]


def select_metrics(rows: Sequence[Row], names: Sequence[str], detectors: Sequence[str]) -> list[Row]:
    """Return the rows with only the scores of these names.

    Args:
        detectors: detection scores shown.

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
            if all_scores()[name].is_of_rule:  # undefined for the split it was calibrated on
                found = [m for row in rows for m in row["metrics"] if m["name"] == name] or found
            if all(m["value"] is None for m in found):
                reason = found[0]["undefined"] if found else _explain_absence(name, rows)
                raise DataError(f"\0metric\0 {name} is undefined on split {split!r}: {reason}", code="undefined_metric")


def _explain_absence(name: str, rows: Sequence[Row]) -> str:
    """Return why no row has a score."""
    score = all_scores()[name]
    if score.needs is not None:
        return f"it needs {score.needs}"
    makers = (score, *([all_scores()[score.computed_by]] if score.computed_by else []))
    is_of_split = any(one.of_split is not None for one in makers)
    if is_of_split:
        has_labels = any(read_recorded_name(row) is not None for row in rows)
        return "it does not support several labels per example" if has_labels else "it needs several labels per example"
    if any(one.of_reference is not None for one in makers):
        return "it needs predictions to compare with (\0reference\0)"
    if any(one.of_draws is not None for one in makers):
        return "it compares draws of weights, which predictions do not have"
    if score.is_of_rule:
        return "these predictions have no calibrated rule that it applies to"
    return "there is no out-of-distribution split"
