"""The table of scores with their intervals, as evaluate has stored them, and the same as a figure."""

from __future__ import annotations

import re

from bnncli.evaluation.metric_rows import Row
from bnncli.evaluation.scores import declared
from bnncli.figures.pages import Block, DataTable, Missing, TableCell, code, paragraph
from bnncli.figures.scores import Line, ScoreIntervals, ScorePanel
from bnncli.session.run import Table
from bnncli.session.score_tables import legend, score_table, shown_scores
from bnncli.session.val_report import gain_table
from bnncli.stages.report.subject import MOST_DRAWN, Subject

_NUMBER = re.compile(r"^[*\s]*([+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)")
_MOST_PANELS = 12
_BETTER = {True: "\n(higher is better)", False: "\n(lower is better)", None: ""}


def scores(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    options = subject.shown
    rows = _own_scores(subject.rows)
    notes = legend(rows, options, options.shown_scores, _replicates(subject))
    table = score_table(rows, notes, scores=options.shown_scores, intervals=True)
    blocks: list[Block] = [
        paragraph(
            "Each score with its 95% interval over examples. To compare two posteriors, use ",
            code(subject.run.suggest("compare")),
            ", which pairs them by example.",
        ),
        data_table(table, f"{subject.key}score-table", f"Scores on {subject.split}{subject.of}, by evaluate", first=1),
    ]
    figure = _figure(subject)
    blocks += [
        data_table(table, f"{subject.key}gains", f"Source of the gain on val{subject.of}")
        for table in gain_table(subject.headers)
    ]
    return [*blocks, *([figure] if figure is not None else [])]


def _own_scores(rows: list[Row]) -> list[Row]:
    """The rows without what holds predictions against those of a reference, which have a section of their own."""
    return [
        {**row, "metrics": [m for m in row["metrics"] if declared()[m["name"]].of_reference is None]} for row in rows
    ]


def data_table(table: Table, name: str, caption: str, *, first: int = 0) -> DataTable:
    """A table of the terminal as one of a page; cells that begin with a number are sorted by it.

    Args:
        first: the column that heads the rows; those before it are left out.
    """
    rows = [[TableCell(row[first]), *(_cell(cell.strip()) for cell in row[first + 1 :])] for row in table.rows]
    heads = [_typeset(column) for column in table.columns[first:]]
    return DataTable(name, caption, heads, rows, notes=[_sentence(_typeset(note)) for note in table.notes])


def _typeset(text: str) -> str:
    """What a terminal writes in ASCII, as a page has it."""
    return text.replace("+-", "±").replace("MMD^2", "MMD²")


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}" + ("" if note.endswith(".") else ".")


def _cell(text: str) -> TableCell:
    """A number above what belongs to it, in brackets or behind a sign; a dash where there is none."""
    found = _NUMBER.match(text)
    if found is None:
        return TableCell("–" if text == "-" else text)
    rest = _typeset(text[found.end() :].strip())
    is_whole = bool(rest) and rest[0] not in "[(±p"
    shown = (text if is_whole else found[0].strip()).replace("-", "−")
    below = (
        [] if is_whole or not rest else re.split(r"(?<=\)) (?=\[)| (?=\(p )", rest)
    )  # a floor, an interval, a p-value
    return TableCell(shown, float(found[1].replace(",", "")), below)


def _replicates(subject: Subject) -> int:
    assert not isinstance(subject.rows, Missing)
    intervals = [m.get("interval") or {} for row in subject.rows for m in row["metrics"]]
    return max((int(one["replicates"]) for one in intervals if one.get("replicates")), default=0)


def _figure(subject: Subject) -> ScoreIntervals | None:
    """The scores that have intervals, a panel each."""
    assert not isinstance(subject.rows, Missing)
    rows = [row for row in _own_scores(subject.rows) if row.get("name") in {group.name for group in subject.drawn}][
        :MOST_DRAWN
    ]
    panels = []
    for score in shown_scores(rows, subject.shown.shown_scores):
        lines = []
        for metric in score.metrics:
            ends = None if metric is None else metric.get("interval")
            value = None if metric is None else metric["value"]
            interval = None if ends is None or value is None else (ends["low"], ends["high"])
            lines.append(Line((), value, interval, is_marked=True))
        if any(line.interval is not None for line in lines):
            panels.append(ScorePanel(score.title + _BETTER[score.higher_is_better], lines))
    if not panels:
        return None
    return ScoreIntervals(
        f"{subject.key}scores-{subject.split}",
        [subject.titles[row["name"]] for row in rows],
        panels[:_MOST_PANELS],
        f"Scores on {subject.split} with 95% intervals",
        "The interval for ECE excludes the floor, and may be below the mark.",
    )
