"""Rows of scores: of evaluate's document, with what was published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from network_parts._bench import Done, Folder
from network_parts._table import Cell, Table

COLUMNS = {"posterior": "", "integrator": "", "accuracy": ".4f", "nll": ".4f", "brier": ".4f", "ece": ".4f", "mmd2": ".3f",
           "seconds": ".1f", "CPU s": ".1f", "MiB": ".0f"}  # fmt: skip
_COSTS = ("seconds", "CPU s", "MiB")
# Of each score that has several forms, the one that is shown: what the row must have.
_FORMS: dict[str, dict[str, Any]] = {"ece": {"strategy": "equal-width", "bins": 15}, "mmd2": {"estimator": "unbiased"}}


def score_rows(document: dict[str, Any], split: str = "test") -> list[dict[str, Cell]]:
    """Posterior, integrator and the scores of COLUMNS, of each row of `evaluate --json` of a split."""
    rows: list[dict[str, Cell]] = []
    for row in document["rows"]:
        if row["split"] == split:
            scores = {name: _value(row["metrics"], name) for name in COLUMNS if name not in _COSTS}
            rows.append({**scores, "posterior": row["posterior"], "integrator": row["integrator"]})
    return rows


def score_table(title: str, folder: Folder, made: dict[str, Done], published: Iterable[dict[str, Cell]] = ()) -> Table:
    """The scores of all that was predicted, with what each posterior cost; then what was published.

    Args:
        made: the command that made each posterior, by its name.
    """
    table = Table(title, COLUMNS)
    for row in score_rows(folder.bnncli("evaluate").document):
        done = made.get(str(row["posterior"]))
        cost: dict[str, Cell] = dict(zip(_COSTS, done.cost, strict=True)) if done else {}
        table.rows.append({**row, **cost})
    for known in published:
        table.rows.append({"integrator": "published", **known})
    return table


def _value(metrics: list[dict[str, Any]], name: str) -> float | None:
    """The value of a score in the form that is shown."""
    for metric in metrics:
        if metric["name"] == name and all(metric.get(key) == value for key, value in _FORMS.get(name, {}).items()):
            value = metric["value"]
            return None if value is None else float(value)
    return None
