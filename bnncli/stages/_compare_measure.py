"""The scores that compare shows: measured for every posterior and checkpoint from the files of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncli.assertions import Quantity
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.checks import find_metric, forms
from bnncli.evaluation.detection_scores import PREDICTION_SCORES
from bnncli.evaluation.measured import Measured, measure_detection, measure_split, needed_scores
from bnncli.evaluation.paired import Sample
from bnncli.evaluation.rows import split_scores
from bnncli.options import CompareOptions
from bnncli.stages._evaluate_rows import SplitPredictions
from bnncli.stages._prediction_groups import Group
from bnncli.stages._run import Run

OF_TWO_SPLITS = ("auroc", "aupr", "fpr95")


@dataclass(frozen=True)
class Entry:
    """A score of one posterior; `samples` is None where a checkpoint leaves it undefined, for the reason given."""

    samples: Sample | None
    undefined: str | None = None


@dataclass(frozen=True)
class Column:
    """One score of all posteriors.

    Args:
        row: name, the choices that define it, higher_is_better.
        form: how it is written among the other columns, as ece:equal-mass.
        entries: one for each posterior.
    """

    row: dict[str, Any]
    form: str
    entries: list[Entry]

    def answers(self, wanted: Quantity) -> bool:
        """Whether it is what was asked for."""
        return bool(find_metric([self.row], wanted))


def measure(run: Run, options: CompareOptions, groups: dict[str, list[Group]]) -> list[Column]:
    """The scores wanted of every posterior, in the order wanted; groups has a group for each checkpoint."""
    num_checkpoints = len(next(iter(groups.values())))
    bootstrap = Bootstrap(options.bootstrap, 1 - options.alpha, options.seed) if num_checkpoints == 1 else None
    measured: list[list[list[Measured]]] = []  # of each checkpoint, of each posterior
    for place in range(num_checkpoints):
        run.console.poll("compare")
        measured.append(_measure_checkpoint(run, options, [own[place] for own in groups.values()], bootstrap))
    rows = {one.key: one.row for checkpoint in measured for own in checkpoint for one in own}
    names: dict[tuple[tuple[str, str], ...], str] = {}
    for wanted in options.scores:
        usual = find_metric(list(rows.values()), wanted)
        picked = {key: row for key, row in rows.items() if any(row is one for one in usual)}
        for key, form in zip(picked, _forms(list(picked.values()), wanted), strict=True):
            names.setdefault(key, form)
    columns = []
    for key, form in names.items():
        row = rows[key]
        entries = [
            _entry([next((one for one in checkpoint[label] if one.key == key), None) for checkpoint in measured])
            for label in range(len(groups))
        ]
        columns.append(Column(row, form, entries))
    return columns


def _measure_checkpoint(
    run: Run, options: CompareOptions, groups: Sequence[Group], bootstrap: Bootstrap | None
) -> list[list[Measured]]:
    """The scores wanted of each posterior of one checkpoint."""
    own_wanted = [wanted for wanted in options.scores if wanted.metric not in OF_TWO_SPLITS]
    other_wanted = [wanted for wanted in options.scores if wanted.metric in OF_TWO_SPLITS]
    inside = [SplitPredictions(group.splits(is_ood=False)[options.split]) for group in groups]
    split = (options.split, len(inside[0].examples))
    measured: list[list[Measured]] = [[] for _ in groups]
    if own_wanted:
        scores = [split_scores(p.file.probs, p.examples, p.file.mutual_info, num_bins=options.bins) for p in inside]
        measured = measure_split(scores, own_wanted, split=split, bootstrap=bootstrap)
    others = dict.fromkeys(name for group in groups for name in group.splits(is_ood=True)) if other_wanted else {}
    for ood in others:
        run.console.poll(f"compare {ood}")
        places = [place for place, group in enumerate(groups) if ood in group.splits(is_ood=True)]
        outside = [SplitPredictions(groups[place].splits(is_ood=True)[ood]) for place in places]
        names = needed_scores(PREDICTION_SCORES, other_wanted, ood)
        vectors = [
            (inside[place].detection_scores(names), far.detection_scores(names))
            for place, far in zip(places, outside, strict=True)
        ]
        size = (ood, len(outside[0].examples))
        found = measure_detection(vectors, other_wanted, split=split, ood=size, bootstrap=bootstrap)
        for place, own in zip(places, found, strict=True):
            measured[place] += own
    return measured


def _entry(found: Sequence[Measured | None]) -> Entry:
    """What the checkpoints together say of a score."""
    values = []
    for one in found:
        if one is None:
            return Entry(None, "no such score of these predictions")
        if one.value is None:
            return Entry(None, one.undefined)
        values.append(one.value)
    return Entry(Sample(np.array(values), found[0].replicates if len(found) == 1 and found[0] is not None else None))


def _forms(rows: Sequence[dict[str, Any]], wanted: Quantity) -> list[str]:
    """How each column that one score asks for is written: as it was asked for, and what tells the columns apart."""
    names = []
    for row, form in zip(rows, forms(rows), strict=True):
        parts = [wanted.metric, *wanted.choices]
        telling = [*form.split(":")[1:], *([row["ood"]] if "ood" in row else [])]
        names.append(":".join([*parts, *dict.fromkeys(choice for choice in telling if choice not in parts)]))
    return names
