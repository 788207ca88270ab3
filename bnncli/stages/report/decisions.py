"""What the rules of calibrate decide on the split that is shown, beside what they guarantee."""

from __future__ import annotations

from typing import Any

from bnncli.artifacts.posteriors import DecisionFile
from bnncli.decisions import KINDS, OOD, RISK, SETS
from bnncli.evaluation.scores import declared
from bnncli.figures.pages import Block, DataTable, Missing, TableCell
from bnncli.names import percent
from bnncli.session.decisions import open_decisions
from bnncli.session.score_tables import score_title
from bnncli.stages.report.subject import Subject


def decisions(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    rows = []
    for row in subject.rows:
        own = [m for m in row["metrics"] if declared()[m["name"]].is_of_rule and m["value"] is not None]
        rules = {one.name: one for one in open_decisions(subject.run, row["name"])}
        known = sorted(
            (m for m in own if m["rule"] in rules), key=lambda m: (KINDS.index(rules[m["rule"]].kind), m["rule"])
        )
        rows += [_cells(subject.titles[row["name"]], rules[m["rule"]], m) for m in known]
    if not rows:
        sentence = (
            f"No rule of calibrate was scored on {subject.split}. Prediction sets, accepted predictions, "
            "outliers and shift alarms with guarantees need a split that was not used to choose anything else."
        )
        return [Missing(sentence, subject.run.suggest("calibrate", sets="lac"))]
    return [
        DataTable(
            f"{subject.key}decisions-table",
            f"Decisions on {subject.split}",
            ["posterior", "rule", "guaranteed", "result", "value"],
            rows,
            notes=[
                "Brackets: 95% interval. Guarantees hold for examples like those the rule was calibrated on; a "
                "small shift p means that a split is not like them."
            ],
        )
    ]


def _cells(posterior: str, rule: DecisionFile, metric: dict[str, Any]) -> list[TableCell]:
    ends, title = metric.get("interval"), score_title(metric)
    interval = f"[{ends['low']:.3f}, {ends['high']:.3f}]" if ends else ""
    other = f" on {metric['ood']}" if metric.get("ood") else ""
    value = TableCell(f"{metric['value']:.3g}", float(metric["value"]), interval)
    return [
        TableCell(posterior),
        TableCell(rule.name),
        TableCell(_guaranteed(rule)),
        TableCell(f"{title}{other}"),
        value,
    ]


def _guaranteed(rule: DecisionFile) -> str:
    """In a few words."""
    settings = rule.header.meta["settings"]
    sure = settings.get("confidence")
    of_splits = "" if sure is None else f" ({percent(sure, 'g')} sure)"
    if rule.kind == SETS:
        whose = " of each class" if settings["class_conditional"] else ""
        return f"{settings['sets']}: {percent(settings['coverage'], 'g')} covered{whose}{of_splits}"
    if rule.kind == RISK:
        return f"at most {percent(settings['risk'], 'g')} wrong{of_splits}"
    if rule.kind == OOD:
        return f"at most {percent(settings['false_alarm'], 'g')} false alarms{of_splits}"
    return f"at most {percent(settings['shift_level'], 'g')} false alarms for batches"
