"""What confidence is good for: telling errors from what is right, and what is out of distribution from what is in it."""

from __future__ import annotations

from bnncli.evaluation.binned_confidence import HISTOGRAM_EDGES
from bnncli.figures.confidence import ConfidenceHistograms
from bnncli.figures.risk_coverage import RiskCoverage
from bnncli.figures.roc import Roc
from bnncli.options.assertions import Quantity
from bnncli.pages.blocks import Block, Missing
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
                "The run has no out-of-distribution split, so that nothing is said of what the network was never shown.",
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
    curves, areas = {}, {}
    for group in subject.drawn:
        if ood not in group.splits(is_ood=True):
            continue
        curve = subject.binned(group, subject.split).roc(subject.binned(group, ood))
        if curve is not None:
            title = subject.titles[group.name]
            curves[title], areas[title] = curve, score_value(subject, group, Quantity("auroc", (ood,)))
    return Roc(curves, subject.split, ood, areas, subject.key) if curves else None
