"""Reliability diagrams of the predictions: are examples right as often as the predictions say?"""

from __future__ import annotations

from typing import Any

from bnncli.evaluation.curves import Curve, reliability_of
from bnncli.figures.pages import Block, Missing, paragraph
from bnncli.figures.predictions import ReliabilityDiagrams
from bnncli.options.scoring import Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.score_rows import PredictedSplit, find_metric
from bnncli.stages.report.subject import MOST_DRAWN, Subject


def calibration(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.groups, Missing):
        return [subject.groups]
    curves = {subject.titles[group.name]: _curve(subject, group) for group in subject.drawn}
    found = {key: curve for key, curve in curves.items() if curve is not None}
    if not found:
        return [Missing(f"Split {subject.split} has no labels, so calibration cannot be measured.")]
    errors = {subject.titles[group.name]: score_value(subject, group, Quantity("ece")) for group in subject.drawn}
    return [*left_out(subject), ReliabilityDiagrams(found, subject.split, errors, subject.key)]


def _curve(subject: Subject, group: PredictionGroup) -> Curve | None:
    """Bins of the confidence; of several labels an example of all their decisions."""
    binned = subject.binned(group, subject.split)
    if binned.right is not None:
        return binned.reliability() if binned.num_examples else None
    split = PredictedSplit(group.splits(is_ood=False)[subject.split])
    return None if split.file.labels is None else reliability_of(split.file.probs, split.examples)


def score_value(subject: Subject, group: PredictionGroup, wanted: Quantity) -> float | None:
    """The value of a score of a group in its usual form; None where evaluate does not know it."""
    metric = score_metric(subject, group, wanted)
    return None if metric is None or metric["value"] is None else float(metric["value"])


def score_metric(subject: Subject, group: PredictionGroup, wanted: Quantity) -> dict[str, Any] | None:
    """The same with all that is known of it."""
    row = subject.row_of(group)
    found = [] if row is None else find_metric(row["metrics"], wanted)
    return found[0] if found else None


def left_out(subject: Subject) -> list[Any]:
    """A sentence where there are more posteriors than a figure shows."""
    assert not isinstance(subject.groups, Missing)
    rest = len(subject.groups) - len(subject.drawn)
    if rest <= 0:
        return []
    return [
        paragraph(f"Figures show the first {MOST_DRAWN} of {len(subject.groups)} sets of predictions.", kind="note")
    ]
