"""The work of calibrate: one rule from the predictions of a split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bnncli.artifacts.headers import Header
from bnncli.decisions import OOD, RISK, SETS
from bnncli.decisions.acceptance import fit_acceptance, least_accepted
from bnncli.decisions.levels import least_for_coverage, least_for_rate
from bnncli.decisions.outliers import fit_outliers
from bnncli.decisions.prediction_sets import SetRule, choose_regularisation, fit_thresholds
from bnncli.decisions.rules import Rule
from bnncli.decisions.set_scores import SetScore
from bnncli.decisions.shift import ShiftRule
from bnncli.errors import DataError
from bnncli.numerics.random import stream_seed
from bnncli.options.calibrate import TUNING_SHARE
from bnncli.session.decisions import scores_of
from bnncli.session.score_rows import PredictedSplit

Fit = tuple[Rule, dict[str, Any]]


def fit_rule(
    header: Header, kind: str, settings: Mapping[str, Any], *, is_tuned: bool
) -> tuple[Rule, list[str], dict[str, Any]]:
    """The rule, the classes it is for, and the numbers of the fit.

    Raises:
        DataError: too few examples for the level, with how many it takes; several labels an example; no such score.
    """
    split = PredictedSplit(header)
    if kind in (SETS, RISK) and not split.file.is_exclusive:
        message = "this run is multilabel; sets and accepted predictions need mutually exclusive classes"
        raise DataError(message, code="several_labels", path=header.path)
    if kind == SETS:
        rule, metrics = _sets(split, settings, is_tuned=is_tuned)
    elif kind == RISK:
        rule, metrics = _acceptance(split, settings)
    elif kind == OOD:
        rule, metrics = _outliers(split, settings)
    else:
        scores = scores_of(split, settings["score"])
        _require(split, len(scores), 1, what="a test")
        rule, metrics = ShiftRule(np.sort(scores.astype(np.float64)), settings["shift_level"]), {}
    return rule, list(split.file.classes), {"num_examples": len(split.examples), **metrics}


def _sets(split: PredictedSplit, settings: Mapping[str, Any], *, is_tuned: bool) -> Fit:
    probs, labels = split.file.probs, split.examples.labels
    assert labels is not None
    coverage, num_classes = settings["coverage"], probs.shape[1]
    seed = settings["seed"] if settings["randomized"] else None
    uniform = SetScore("aps", seed).uniform(split.name, len(labels))
    rows = np.arange(len(labels))
    if is_tuned:
        order = np.random.default_rng(stream_seed(settings["seed"], "sets/tuning")).permutation(len(labels))
        tuning, rows = np.sort(order[: _num_tuning(split)]), np.sort(order[_num_tuning(split) :])
        _require(split, len(tuning), 1, what="choosing the raps penalty")
        score = choose_regularisation(
            probs[tuning], labels[tuning], coverage, seed=seed, uniform=None if uniform is None else uniform[tuning]
        )
    elif settings["sets"] == "raps":
        score = SetScore("raps", seed, settings["penalty"], settings["free_ranks"])
    else:
        score = SetScore(settings["sets"], seed)
    own, labels = score.of_labels(probs, labels, uniform)[rows], labels[rows]
    _require_of_classes(split, labels, settings)
    thresholds = fit_thresholds(
        own,
        labels if settings["class_conditional"] else None,
        coverage,
        num_classes=num_classes,
        confidence=settings["confidence"],
    )
    chosen = {"penalty": score.penalty, "free_ranks": score.free_ranks} if settings["sets"] == "raps" else {}
    return SetRule(score, thresholds, settings["nonempty"]), {
        "num_examples": len(rows),
        "thresholds": thresholds.tolist(),
        **chosen,
    }


def _num_tuning(split: PredictedSplit) -> int:
    return int(TUNING_SHARE * len(split.examples))


def _require_of_classes(split: PredictedSplit, labels: np.ndarray, settings: Mapping[str, Any]) -> None:
    """Raise DataError where there are too few examples for the coverage, of all or of a class."""
    least = least_for_coverage(settings["coverage"], settings["confidence"])
    if not settings["class_conditional"]:
        _require(split, len(labels), least, what=f"a coverage of {settings['coverage']:g}")
        return
    counts = np.bincount(labels, minlength=len(split.file.classes))
    few = [f"{name} {count}" for name, count in zip(split.file.classes, counts, strict=True) if count < least]
    if few:
        more = f" and {len(few) - 8} more classes" if len(few) > 8 else ""
        raise DataError(
            f"split {split.name!r}: coverage {settings['coverage']:g} for each class needs at least {least} "
            f"examples per class; got {', '.join(few[:8])}{more}",
            code="too_few",
            hint="calibrate on a larger split, or without \0class_conditional\0",
            path=split.header.path,
        )


def _acceptance(split: PredictedSplit, settings: Mapping[str, Any]) -> Fit:
    examples, risk, certainty = split.examples, settings["risk"], settings["confidence"]
    assert examples.is_right is not None
    _require(split, len(examples), least_accepted(risk, certainty), what=f"a risk of {risk:g}")
    rule = fit_acceptance(examples.confidence, examples.is_right, risk, certainty)
    return rule, {
        "most_doubt": rule.most_doubt,
        "threshold": None if rule.most_doubt is None else 1 - rule.most_doubt,
        "num_accepted": rule.num_accepted,
        "num_wrong": rule.num_wrong,
    }


def _outliers(split: PredictedSplit, settings: Mapping[str, Any]) -> Fit:
    scores, rate, certainty = scores_of(split, settings["score"]), settings["false_alarm"], settings["confidence"]
    _require(split, len(scores), least_for_rate(rate, certainty), what=f"a false-alarm rate of {rate:g}")
    rule = fit_outliers(scores, rate, certainty)
    return rule, {"threshold": rule.threshold}


def _require(split: PredictedSplit, count: int, least: int, *, what: str) -> None:
    """Raise DataError where there are fewer examples than it takes."""
    if count < least:
        raise DataError(
            f"split {split.name!r} has {count} examples to calibrate on; {what} needs at least {least}",
            code="too_few",
            hint="calibrate on a larger split",
            path=split.header.path,
        )
