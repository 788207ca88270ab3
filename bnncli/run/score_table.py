"""The table that evaluate prints: a row for each split, posterior and integrator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.scores import declared
from bnncli.likelihoods import recorded_name
from bnncli.names import posterior_title
from bnncli.run.session import Table

_FIRST = ("split", "posterior", "integrator", "draws")

Form = tuple[str, str | None, tuple[str | None, ...]]
Head = Callable[[Mapping[str, Any]], list[str]]  # what a row of the table begins with, of a row of scores


def score_table(
    rows: Sequence[Mapping[str, Any]],
    notes: list[str],
    *,
    chosen: Sequence[str] = (),
    scores: Sequence[str] = (DEFAULT_SCORE,),
    intervals: bool = False,
    first: Sequence[str] = _FIRST,
    head: Head | None = None,
) -> Table:
    """The rows of evaluate as a Table; an undefined score is a dash.

    Args:
        chosen: names of the scores to show, in all their forms; none: the usual ones.
        scores: by which detection is shown.
        intervals: whether each score is followed by its interval, where it has one.
        first: the columns before the scores, three or more, of which the first is the split.
        head: what stands in them; None: the names of a run's predictions.
    """
    ordered = sorted(rows, key=lambda row: (row["split"] != "test", row["split"]))
    shown = [_shown(row, chosen, scores) for row in ordered]
    forms = _columns(shown)
    cells = [
        [*(head or run_head)(row), *(_cell(found.get(form), intervals) for form in forms)]
        for row, found in zip(ordered, shown, strict=True)
    ]
    columns = [*first, *_titles(forms, shown)]
    return Table(columns, cells, notes=notes, narrow=_turned(columns, cells))


class ShownScore(NamedTuple):
    """One column of the table: its title, which way is better, and its metric in each row, None where it has none."""

    title: str
    higher_is_better: bool | None
    metrics: list[Mapping[str, Any] | None]


def shown_scores(rows: Sequence[Mapping[str, Any]], scores: Sequence[str] = (DEFAULT_SCORE,)) -> list[ShownScore]:
    """The usual scores of rows of evaluate, in the order and by the titles of the table.

    Args:
        scores: by which detection is shown.
    """
    shown = [_shown(row, (), scores) for row in rows]
    forms = _columns(shown)
    found = []
    for form, title in zip(forms, _titles(forms, shown), strict=True):
        metrics = [own.get(form) for own in shown]
        first = next(metric for metric in metrics if metric is not None)
        found.append(ShownScore(title, first["higher_is_better"], metrics))
    return found


def score_title(metric: Mapping[str, Any]) -> str:
    """What a score is called in a table, without the choices that tell it from its like."""
    return declared()[metric["name"]].title.format(**metric)


def _shown(row: Mapping[str, Any], chosen: Sequence[str], scores: Sequence[str]) -> dict[Form, Mapping[str, Any]]:
    """The scores of a row that are shown, by their forms."""
    has_labels = recorded_name(row) is not None
    return {_form(m): m for m in row["metrics"] if _is_shown(m, chosen, scores, has_labels=has_labels)}


def _is_shown(metric: Mapping[str, Any], chosen: Sequence[str], scores: Sequence[str], *, has_labels: bool) -> bool:
    if "ood" in metric and metric.get("score", scores[0]) not in scores:  # AURC has a score of its own
        return False
    if chosen:
        return metric["name"] in chosen
    score = declared()[metric["name"]]
    if has_labels and score.shown_of_labels is not None:
        return all(metric.get(key) == value for key, value in score.shown_of_labels.items())
    return score.is_shown and all(metric.get(key) == value for key, value in score.usual.items())


def _form(metric: Mapping[str, Any]) -> Form:
    """What a metric shares with its like in other rows: name, the other split, the choices that tell it from its forms."""
    return metric["name"], metric.get("ood"), tuple(metric.get(key) for key in declared()[metric["name"]].told_by)


def _columns(shown: Sequence[Mapping[Form, Any]]) -> list[Form]:
    """Every form there is, in the order of the scores; what is measured against another split stands together."""
    forms = list(dict.fromkeys(form for found in shown for form in found))
    others = list(dict.fromkeys(ood for _, ood, _ in forms))
    rank = list(declared()).index
    first = min((rank(name) for name, ood, _ in forms if ood is not None), default=0)

    def place(form: Form) -> tuple[int, int, int]:
        name, ood, _ = form
        return (rank(name), 0, 0) if ood is None else (first, others.index(ood), rank(name))

    return sorted(forms, key=place)


def _titles(forms: Sequence[Form], shown: Sequence[Mapping[Form, Any]]) -> list[str]:
    """The title of each form: its score, the other split, and the choices in which it differs from its like."""
    titles = []
    for form in forms:
        name, ood, choices = form
        example = next(found[form] for found in shown if form in found)
        like = [others for other, _, others in forms if other == name]
        telling = [text for i, text in enumerate(choices) if text is not None and len({o[i] for o in like}) > 1]
        titles.append(" ".join([score_title(example), *([ood] if ood else []), *telling]))
    return titles


def _turned(columns: list[str], cells: list[list[str]]) -> list[Table]:
    """The same numbers for a narrow terminal: a table for each split, a row for each score."""
    tables = []
    for split in dict.fromkeys(row[0] for row in cells):
        chosen = [row for row in cells if row[0] == split]
        scores = [[name, *(row[i] for row in chosen)] for i, name in enumerate(columns) if i >= 3]
        tables.append(Table([split, *(f"{row[1]} {row[2]}" for row in chosen)], scores))
    return tables


def run_head(row: Mapping[str, Any]) -> list[str]:
    """Split, posterior, integrator and number of draws."""
    title = posterior_title(row["posterior"], row["variant"], row.get("name"))
    return [row["split"], title, row["variant"], "-" if row["samples"] is None else str(row["samples"])]


def _cell(metric: Mapping[str, Any] | None, intervals: bool) -> str:
    if metric is None or metric["value"] is None:
        return "-"
    digits = declared()[metric["name"]].digits
    shown, ends = number_text(metric["value"], digits), metric.get("interval")
    if metric.get("floor") is not None:
        shown += f" (floor {number_text(metric['floor'], digits)})"
    if metric.get("p_value") is not None:  # of a distance
        shown += f" +- {number_text(metric['standard_error'], digits)} (p {metric['p_value']:.2g})"
    if not intervals or ends is None:
        return shown
    return f"{shown} [{number_text(ends['low'], digits)}, {number_text(ends['high'], digits)}]"


def number_text(value: float, digits: int) -> str:
    """A number of a table, with so many decimals."""
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero
