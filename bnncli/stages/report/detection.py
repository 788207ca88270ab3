"""What confidence is good for: telling errors from what is right, and what is out of distribution from what is in it."""

from __future__ import annotations

from bnncli.evaluation.binned_confidence import HISTOGRAM_EDGES, MOST_POINTS
from bnncli.evaluation.curves import Curve, roc_curve
from bnncli.figures.pages import Block, Missing
from bnncli.figures.predictions import ConfidenceHistograms, RiskCoverage, Roc, merged
from bnncli.options.scoring import Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.score_rows import PredictedSplit
from bnncli.stages.report.calibration import score_value
from bnncli.stages.report.subject import Subject

_MOST_SPLITS = 3  # out of distribution, in one report


def detection(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.groups, Missing):
        return [subject.groups]
    outside = subject.outside[:_MOST_SPLITS]
    blocks: list[Block] = [_histograms(subject, outside)]
    risk = _risk(subject)
    blocks += [risk] if risk is not None else []
    for ood in outside:
        roc = _roc(subject, ood)
        blocks += [roc] if roc is not None else []
    if not outside:
        command = subject.run.suggest("extract-features", model="MODEL", ood=["NAME=SPEC"])
        blocks.append(
            Missing(
                "The run has no out-of-distribution split, so detection of unknown inputs was not measured.",
                command,
            )
        )
    return blocks


def _histograms(subject: Subject, outside: list[str]) -> ConfidenceHistograms:
    panels = {}
    for group in subject.drawn:
        there = [subject.split, *(name for name in outside if name in group.splits(is_ood=True))]
        panels[subject.titles[group.name]] = {name: subject.binned(group, name).histogram() for name in there}
    return ConfidenceHistograms(HISTOGRAM_EDGES.tolist(), panels, subject.split, subject.key)


def _risk(subject: Subject) -> RiskCoverage | None:
    curves, areas = {}, {}
    for group in subject.drawn:
        curve = subject.binned(group, subject.split).risk_coverage()
        if curve is not None:
            title = subject.titles[group.name]
            curves[title], areas[title] = curve, score_value(subject, group, Quantity("aurc"))
    return RiskCoverage(curves, subject.split, areas, subject.key) if curves else None


def _roc(subject: Subject, ood: str) -> Roc | None:
    curves: dict[str, Curve] = {}
    areas, score = {}, subject.shown.curve_score
    for group in subject.drawn:
        if ood not in group.splits(is_ood=True):
            continue
        curve = _roc_curve(subject, group, ood, score)
        if curve is not None:
            title = subject.titles[group.name]
            curves[title], areas[title] = curve, score_value(subject, group, Quantity("auroc", (ood, score)))
    if not curves:
        return None
    shown, known = merged(curves, areas)
    return Roc(shown, subject.split, ood, known, score, subject.key)


def _roc_curve(subject: Subject, group: PredictionGroup, ood: str, score: str) -> Curve | None:
    """The curve of one group; None where it has no such score, or no examples."""
    if score == "max_prob":
        return subject.binned(group, subject.split).roc(subject.binned(group, ood))
    headers = group.splits(is_ood=False)[subject.split], group.splits(is_ood=True)[ood]
    inside, outside = (PredictedSplit(header).detection_scores([score])[score] for header in headers)
    if isinstance(inside, str) or isinstance(outside, str) or not len(inside) or not len(outside):
        return None
    return roc_curve(inside, outside, most=MOST_POINTS)
