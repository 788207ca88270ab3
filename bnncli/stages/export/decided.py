"""What rules of calibrate decide by, as a file has it: prediction sets, and thresholds for its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.posteriors import DecisionFile
from bnncli.decisions.acceptance import AcceptanceRule
from bnncli.decisions.outliers import OutlierRule
from bnncli.decisions.prediction_sets import SetRule
from bnncli.errors import DataError, UsageError
from bnncli.export.parts import HeadParts, with_sets
from bnncli.lazy import torch
from bnncli.options.export import ExportOptions
from bnncli.session.decisions import open_decisions
from bnncli.session.run import Run

if TYPE_CHECKING:
    from torch import Tensor


def open_rules(run: Run, name: str, options: ExportOptions, *, posterior: str) -> list[DecisionFile]:
    """The rules of calibrate that were named, for the predictions of this name, <posterior>.<integrator>.

    Args:
        posterior: the content digest of the one that is exported.

    Raises:
        MissingInput, DataError: there is none that can be used, or it is of another posterior.
        UsageError: a file cannot have what it decides by, or two give sets.
    """
    found = open_decisions(run, name, only=list(dict.fromkeys(options.decide)))
    for one in found:
        if (why := _why_not(one, str(options.score))) is not None:
            message = f"\0decide\0: rule {one.name!r} of {name} {why}"
            raise UsageError(message, code="unsupported_export")
        if one.header.meta["maker"].get("posterior") != posterior:
            message = f"{one.header.path} was calibrated with a posterior other than {name.partition('.')[0]}"
            raise DataError(message, code="wrong_posterior", path=one.header.path)
    if len(sets := [one.name for one in found if isinstance(one.rule, SetRule)]) > 1:
        raise UsageError(f"\0decide\0: a file has one output `set`, but {' and '.join(sets)} each give a set")
    return found


def _why_not(decision: DecisionFile, score: str) -> str | None:
    """Why a file cannot have what a rule decides by; None where it can."""
    rule = decision.rule
    if isinstance(rule, SetRule):
        return (
            None
            if rule.score.seed is None
            else "draws a random number for each example, which an exported file cannot do"
        )
    if isinstance(rule, OutlierRule):
        own = decision.header.meta["settings"]["score"]
        return None if own == score else f"uses {own}, but ood_score is {score}; add \0score\0 {own}"
    return None if isinstance(rule, AcceptanceRule) else "applies to whole batches, which an exported file does not see"


def thresholds_of(decision: DecisionFile) -> dict[str, Any]:
    """What whoever runs the file decides by: of which output, from where on, and what is guaranteed."""
    rule, settings = decision.rule, decision.header.meta["settings"]
    found: dict[str, Any] = {"kind": decision.kind, "confidence": settings["confidence"]}
    if isinstance(rule, SetRule):
        return {**found, "output": "set", "coverage": settings["coverage"]}
    if isinstance(rule, OutlierRule):
        above = -rule.threshold
        return {**found, "output": "ood_score", "outlier_above": above, "false_alarm": settings["false_alarm"]}
    assert isinstance(rule, AcceptanceRule)
    least = None if rule.most_doubt is None else 1 - rule.most_doubt
    return {**found, "output": "probs", "accept_largest_from": least, "risk": settings["risk"]}


def with_rule(parts: HeadParts, rule: SetRule, num_classes: int) -> HeadParts:
    """With the rule's sets."""
    score, thresholds = rule.score, torch.from_numpy(np.asarray(rule.thresholds))
    if score.scheme == "lac":
        return with_sets(parts, thresholds, is_filled=rule.is_filled)
    beyond = torch.arange(1, num_classes + 1, dtype=torch.float64) - score.free_ranks
    return with_sets(parts, thresholds, score.penalty * beyond.clamp_min(0), is_filled=rule.is_filled)


def agreement(rule: SetRule, probs: Tensor, sets: Tensor) -> dict[str, Any]:
    """Of the rows that were checked: the share whose set is the rule's of the probabilities of predict, and mean sizes of both."""
    expected = rule.sets(probs.numpy())
    return {
        "same": float((expected == sets.numpy()).all(axis=1).mean()),
        "size": float(sets.sum(dim=1, dtype=torch.float64).mean()),
        "size_of_predict": float(expected.sum(axis=1).mean()),
    }
