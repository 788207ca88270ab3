"""The table of evaluate for --per-class: a row for each class of each row, or for each of several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnncli.likelihoods import recorded_name
from bnncli.names import posterior_title
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.score_rows import PredictedSplit
from bnncli.run.score_table import number_text, score_title
from bnncli.run.session import Table
from bnncli.scores import declared

Row = Mapping[str, Any]
_OF_ALL = ("macro ", "class ")  # how titles say that a score is a mean over classes


def with_classes(rows: Sequence[Row], groups: Sequence[PredictionGroup]) -> list[dict[str, Any]]:
    """The rows with `classes`, the names of theirs, and `class_counts`, how many examples have each (None without labels)."""
    found = {}
    for name, header in {name: one for group in groups for name, one in group.splits(is_ood=False).items()}.items():
        file = PredictedSplit(header).file
        counts = None if file.labels is None else np.asarray(file.labels)
        if counts is not None:
            counts = counts.sum(axis=0) if counts.ndim == 2 else np.bincount(counts, minlength=len(file.classes))
        found[name] = {"classes": file.classes, "class_counts": None if counts is None else counts.tolist()}
    return [
        {**row, **found[row["split"]]} if any("per_class" in m for m in row["metrics"]) else {**row} for row in rows
    ]


def class_table(rows: Sequence[Row]) -> Table | None:
    """Scores of every class, of rows that have classes; None where none has."""
    told = [row for row in rows if "classes" in row]
    if not told:
        return None
    ordered = sorted(told, key=lambda row: (row["split"] != "test", row["split"]))
    titles = list(dict.fromkeys(_title(row, metric) for row in ordered for metric in _of_classes(row)))
    cells = [cell for row in ordered for cell in _cells(row, titles)]
    what = "class" if recorded_name(ordered[0]) is None else "label"
    return Table(["split", "posterior", "integrator", what, "examples", *titles], cells)


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


def _cells(row: Row, titles: Sequence[str]) -> list[list[str]]:
    title = posterior_title(row["posterior"], row["variant"], row.get("name"))
    by_title = {_title(row, metric): metric for metric in _of_classes(row)}
    found = []
    for k, name in enumerate(row["classes"]):
        count = "-" if row["class_counts"] is None else str(row["class_counts"][k])
        scores = [_score(by_title.get(one), k) for one in titles]
        found.append([row["split"], title, row["variant"], name, count, *scores])
    return found


def _score(metric: Row | None, k: int) -> str:
    value = None if metric is None else metric["per_class"][k]
    return "-" if metric is None or value is None else number_text(value, declared()[metric["name"]].digits)
