"""How near predictions come to those of a reference, where evaluate has held them against one."""

from __future__ import annotations

from bnncli.evaluation.scores import declared
from bnncli.figures.pages import Block, DataTable, Missing, TableCell
from bnncli.session.score_tables import score_title
from bnncli.stages.report.subject import Subject


def fidelity(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    found = [
        (row, [m for m in row["metrics"] if declared()[m["name"]].of_reference is not None and m["value"] is not None])
        for row in subject.rows
    ]
    held = [(row, metrics) for row, metrics in found if metrics]
    if not held:
        has_draws = any(header.kind == "samples" for header in subject.headers.values())
        command = (
            subject.run.suggest("evaluate", reference="hmc", force=True) if has_draws else subject.run.suggest("hmc")
        )
        sentence = "The predictions were not compared with those of a reference."
        return [Missing(sentence, command)]
    titles = list(dict.fromkeys(score_title(metric) for _, metrics in held for metric in metrics))
    rows = []
    for row, metrics in held:
        cells = {score_title(metric): metric for metric in metrics}
        rows.append([TableCell(subject.titles[row["name"]]), *(_cell(cells.get(title)) for title in titles)])
    reference = held[0][1][0].get("reference", "a reference")
    table = DataTable(
        f"{subject.key}fidelity-table",
        f"Predictions on {subject.split} compared with those of {reference}",
        ["posterior", *titles],
        rows,
        notes=[
            "Brackets: 95% interval. Floor: the difference between two halves of the reference's own draws; no "
            "posterior can do better."
        ],
    )
    return [table]


def _cell(metric: dict | None) -> TableCell:
    if metric is None:
        return TableCell("–")
    ends, floor = metric.get("interval"), metric.get("floor")
    below = [f"[{ends['low']:.4f}, {ends['high']:.4f}]"] if ends else []
    below += [f"(floor {floor:.4f})"] if floor is not None else []
    return TableCell(f"{metric['value']:.4f}", float(metric["value"]), below)
