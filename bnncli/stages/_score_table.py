"""The table that evaluate prints: a row for each split, posterior and integrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bnncli.stages._run import Table

_PLAIN = (
    ("accuracy", "accuracy", 4),
    ("nll", "NLL", 4),
    ("brier", "Brier", 4),
    ("ece", "ECE", 4),
    ("mce", "MCE", 4),
)

_NAMES = {title: name for name, title, _ in _PLAIN} | {"AUROC": "auroc", "FPR95": "fpr95", "MMD^2": "mmd2"}


def score_table(rows: Sequence[dict[str, Any]], notes: list[str]) -> Table:
    """The rows of evaluate as a Table; an undefined score is a dash."""
    others = list(dict.fromkeys(m["ood"] for row in rows for m in row["metrics"] if "ood" in m))
    columns = ["split", "posterior", "integrator", *(title for _, title, _ in _PLAIN)]
    for name in others:
        columns += [f"AUROC {name}", f"FPR95 {name}"]
    columns += ["MMD^2", "MMD^2 biased"]
    ordered = sorted(rows, key=lambda row: (row["split"] != "test", row["split"]))
    cells = [_cells(row, others) for row in ordered]
    names = {metric["name"] for row in rows for metric in row["metrics"]}
    kept = [i for i, title in enumerate(columns) if i < 3 or _NAMES[title.split()[0]] in names]
    columns, cells = [columns[i] for i in kept], [[row[i] for i in kept] for row in cells]
    return Table(columns, cells, notes=notes, narrow=_turned(columns, cells))


def _turned(columns: list[str], cells: list[list[str]]) -> list[Table]:
    """The same numbers for a narrow terminal: a table for each split, a row for each score."""
    tables = []
    for split in dict.fromkeys(row[0] for row in cells):
        chosen = [row for row in cells if row[0] == split]
        scores = [[name, *(row[i] for row in chosen)] for i, name in enumerate(columns) if i >= 3]
        tables.append(Table([split, *(f"{row[1]} {row[2]}" for row in chosen)], scores))
    return tables


def _cells(row: dict[str, Any], others: list[str]) -> list[str]:
    cells = [row["split"], row["posterior"], row["integrator"]]
    cells += [_cell(row, digits, name=name) for name, _, digits in _PLAIN]
    for other in others:
        cells += [_cell(row, 3, name="auroc", ood=other), _cell(row, 3, name="fpr95", ood=other)]
    return cells + [_cell(row, 4, name="mmd2", estimator=estimator) for estimator in ("unbiased", "biased")]


def _cell(row: dict[str, Any], digits: int, **wanted: str) -> str:
    for metric in row["metrics"]:
        if all(metric.get(key) == value for key, value in wanted.items()):
            if metric["value"] is None:
                return "-"
            return f"{round(metric['value'], digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero
    return "-"
