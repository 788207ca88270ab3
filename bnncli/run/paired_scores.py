"""Chosen scores of several predictions of the same examples, all resampled alike: what paired differences are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import DetectionForm, Ranking, form_rows
from bnncli.evaluation.scores import detection_forms
from bnncli.evaluation.weighted_scores import ScoreGroup
from bnncli.options.assertions import Quantity
from bnncli.run.score_assertions import find_metric

Row = dict[str, Any]
Vectors = Mapping[str, NDArray | str]


@dataclass(frozen=True)
class Measured:
    """One score of one prediction.

    Args:
        row: its name, the choices that define it, higher_is_better.
        value: None where undefined, for the reason in `undefined`.
        replicates: (R,), NaN where undefined; None where the score is, or without a bootstrap.
    """

    row: Row
    value: float | None
    undefined: str | None = None
    replicates: NDArray[np.float64] | None = None

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What it has in common with the same score of other predictions."""
        return tuple((name, str(value)) for name, value in self.row.items())


def measure_split(
    predictions: Sequence[Sequence[ScoreGroup]],
    wanted: Sequence[Quantity],
    *,
    split: tuple[str, int],
    bootstrap: Bootstrap | None = None,
) -> list[list[Measured]]:
    """The scores wanted of each of several predictions of one split, in the order wanted.

    Args:
        predictions: the scores of each, as split_scores gives them.
        split: its name and number of examples.
    """
    chosen = [_chosen(scores, wanted) for scores in predictions]
    needed = [[scores for scores, _, _ in picks] for picks in chosen]

    def statistic(weights: NDArray) -> NDArray[np.float64]:
        """(b, all scores of all predictions); each group of scores is computed once."""
        parts = []
        for picks in needed:
            known = {id(s): s.statistic(weights) for s in picks if s.statistic is not None and split[1] > 0}
            nothing = np.full((len(weights), 1), np.nan)
            parts += [known.get(id(s), np.repeat(nothing, len(s.members), axis=1)) for s in picks]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(weights), 0))

    values = statistic(np.ones((1, split[1])))[0]
    replicates = bootstrap.replicates(statistic, split) if bootstrap is not None and split[1] > 1 else None
    found, start = [], 0
    for picks in chosen:
        own = []
        for scores, member, row in picks:
            place = start + member
            start += len(scores.members)
            reason = scores.undefined if scores.statistic is None else "empty split" if split[1] == 0 else None
            own.append(_measured(row, values[place], reason or scores.members[member].when_nan, replicates, place))
        found.append(own)
    return found


def measure_detection(
    predictions: Sequence[tuple[Vectors, Vectors]],
    wanted: Sequence[Quantity],
    *,
    split: tuple[str, int],
    ood: tuple[str, int],
    bootstrap: Bootstrap | None = None,
) -> list[list[Measured]]:
    """The detection scores wanted of each of several predictions of two splits, in the order wanted.

    Args:
        predictions: for each, the name of a score to its values on the split (N,) and on the other one (M,), or to the
            reason why there is none.
        split, ood: name and number of examples of each.
    """
    chosen = []  # for each prediction: row, form, place of its ranking or the reason why there is none
    rankings: list[Ranking] = []
    for inside, outside in predictions:
        picked = _detection_rows(list(inside), wanted, ood[0])
        names = dict.fromkeys(str(row["score"]) for row, _ in picked)
        places = {name: _ranking(inside[name], outside[name], ood[0], rankings) for name in names}
        chosen.append([(row, form, places[row["score"]]) for row, form in picked])

    # Of each ranking its forms, so that what they share is computed once.
    needed = [
        list(dict.fromkeys(form.statistic for picks in chosen for _, form, own in picks if own == place))
        for place in range(len(rankings))
    ]

    def statistic(*weights: NDArray) -> NDArray[np.float64]:
        pairs = zip(rankings, needed, strict=True)
        found = [dict(zip(own, ranking.evaluate(own, *weights).T, strict=True)) for ranking, own in pairs]
        columns = [
            found[place][form.statistic] if isinstance(place, int) else np.full(len(weights[0]), np.nan)
            for picks in chosen
            for _, form, place in picks
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(weights[0]), 0))

    values = statistic(np.ones((1, split[1])), np.ones((1, ood[1])))[0]
    replicates = bootstrap.replicates(statistic, split, ood) if bootstrap is not None and rankings else None
    flat = iter(range(len(values)))
    return [
        [
            _measured(row, values[column], place if isinstance(place, str) else "undefined", replicates, column)
            for (row, _, place), column in zip(picks, flat, strict=False)
        ]
        for picks in chosen
    ]


def needed_scores(names: Sequence[str], wanted: Sequence[Quantity], ood: str) -> list[str]:
    """The detection scores among `names` that the scores wanted are about."""
    return list(dict.fromkeys(str(row["score"]) for row, _ in _detection_rows(names, wanted, ood)))


def _detection_rows(names: Sequence[str], wanted: Sequence[Quantity], ood: str) -> list[tuple[Row, DetectionForm]]:
    """The row, without a value, and the form of every detection score wanted."""
    forms = form_rows(detection_forms())
    every = [({**row, "score": name, "ood": ood}, form) for name in names for row, form in forms]
    picked = _once([row for one in wanted for row in find_metric([row for row, _ in every], one)])
    by_row = {id(row): form for row, form in every}
    return [(row, by_row[id(row)]) for row in picked]


def _chosen(scores: Sequence[ScoreGroup], wanted: Sequence[Quantity]) -> list[tuple[ScoreGroup, int, Row]]:
    """The scores wanted: each with its group, its place there, and its row without a value."""
    rows: list[tuple[ScoreGroup, int, Row]] = []
    for group in scores:
        for place, score in enumerate(group.members):
            row = {"name": score.name, **score.choices, "higher_is_better": score.higher_is_better}
            rows.append((group, place, row))
    picked = _once([row for one in wanted for row in find_metric([row for _, _, row in rows], one)])
    by_row = {id(row): (group, place, row) for group, place, row in rows}
    return [by_row[id(row)] for row in picked]


def _once(rows: Sequence[Row]) -> list[Row]:
    """The rows without repetitions of the same object."""
    return list({id(row): row for row in rows}.values())


def _ranking(inside: NDArray | str, outside: NDArray | str, ood: str, rankings: list[Ranking]) -> int | str:
    """The place of a new ranking, or the reason why there is none."""
    for side in (inside, outside):
        if isinstance(side, str):
            return side
    if len(inside) == 0 or len(outside) == 0:
        return (
            "the in-distribution split is empty"
            if len(inside) == 0
            else f"only one class is present: split {ood} is empty"
        )
    rankings.append(Ranking(np.asarray(inside), np.asarray(outside)))
    return len(rankings) - 1


def _measured(row: Row, value: float, reason: str, replicates: NDArray | None, column: int) -> Measured:
    if np.isnan(value):
        return Measured(row, None, reason)
    return Measured(row, float(value), None, None if replicates is None else replicates[:, column])
