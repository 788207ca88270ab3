"""The table of \0per_class\0: a row for each class of each row, or for each of several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.scores import declared
from bnncli.likelihoods import recorded_name
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.score_rows import PredictedSplit
from bnncli.run.score_table import Head, number_text, run_head, score_title
from bnncli.run.session import Table

Row = Mapping[str, Any]
_FIRST = ("split", "posterior", "integrator")
_OF_ALL = ("macro ", "class ")  # how titles say that a score is a mean over classes


def with_classes(rows: Sequence[Row], groups: Sequence[PredictionGroup]) -> list[dict[str, Any]]:
    """The rows with `classes`, the names of theirs, and `class_counts`, how many examples have each (None without labels)."""
    found = {}
    for name, header in {name: one for group in groups for name, one in group.splits(is_ood=False).items()}.items():
        file = PredictedSplit(header).file
        found[name] = class_facts(file.labels, file.classes)
    return [
        {**row, **found[row["split"]]} if any("per_class" in m for m in row["metrics"]) else {**row} for row in rows
    ]


def without_classes(row: Row) -> dict[str, Any]:
    """The row without the values of every class."""
    metrics = [{key: value for key, value in metric.items() if key != "per_class"} for metric in row["metrics"]]
    return {**row, "metrics": metrics}


def class_facts(labels: NDArray | None, classes: Sequence[str]) -> dict[str, Any]:
    """What a row with scores of every class says of these: `classes` and `class_counts`."""
    if labels is None:
        return {"classes": list(classes), "class_counts": None}
    own = np.asarray(labels)
    counts = own.sum(axis=0) if own.ndim == 2 else np.bincount(own, minlength=len(classes))
    return {"classes": list(classes), "class_counts": counts.tolist()}


def class_table(rows: Sequence[Row], *, first: Sequence[str] = _FIRST, head: Head = run_head) -> Table | None:
    """Scores of every class, of rows that have classes; None where none has. `first` and `head` as of score_table, of three."""
    told = [row for row in rows if "classes" in row]
    if not told:
        return None
    ordered = sorted(told, key=lambda row: (row["split"] != "test", row["split"]))
    titles = list(dict.fromkeys(_title(row, metric) for row in ordered for metric in _of_classes(row)))
    cells = [cell for row in ordered for cell in _cells(row, titles, head)]
    what = "class" if recorded_name(ordered[0]) is None else "label"
    return Table([*first, what, "examples", *titles], cells)


def _of_classes(row: Row) -> list[Row]:
    return [metric for metric in row["metrics"] if metric.get("per_class") is not None]


def _title(row: Row, metric: Row) -> str:
    """What the score of one class is called; the balanced accuracy of all is the mean of what is the recall of each."""
    if metric["name"] == "balanced_accuracy" and recorded_name(row) is None:
        return "recall"
    title = score_title(metric)
    for words in _OF_ALL:
        title = title.removeprefix(words)
    return title


def _cells(row: Row, titles: Sequence[str], head: Head) -> list[list[str]]:
    by_title = {_title(row, metric): metric for metric in _of_classes(row)}
    found = []
    for k, name in enumerate(row["classes"]):
        count = "-" if row["class_counts"] is None else str(row["class_counts"][k])
        scores = [_score(by_title.get(one), k) for one in titles]
        found.append([*head(row)[:3], name, count, *scores])
    return found


def _score(metric: Row | None, k: int) -> str:
    value = None if metric is None else metric["per_class"][k]
    return "-" if metric is None or value is None else number_text(value, declared()[metric["name"]].digits)
