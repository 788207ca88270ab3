"""Convert rules to arrays and JSON values that can be stored, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions import KINDS, OOD, RISK, SETS, SHIFT
from bnncli.decisions.acceptance import AcceptanceRule
from bnncli.decisions.outliers import OutlierRule
from bnncli.decisions.prediction_sets import SetRule
from bnncli.decisions.set_scores import SetScore
from bnncli.decisions.shift import ShiftRule

Rule = SetRule | AcceptanceRule | OutlierRule | ShiftRule
_SCORE = ("scheme", "seed", "penalty", "free_ranks")
_TESTED = ("num_accepted", "num_wrong", "level", "p_value")


def kind_of(rule: Rule) -> str:
    """Return the kind of a rule, one of KINDS."""
    return {SetRule: SETS, AcceptanceRule: RISK, OutlierRule: OOD, ShiftRule: SHIFT}[type(rule)]


def to_arrays(rule: Rule) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
    """Return the arrays of a rule and its other values."""
    if isinstance(rule, SetRule):
        known = {name: getattr(rule.score, name) for name in _SCORE}
        return {"thresholds": rule.thresholds}, {**known, "is_filled": rule.is_filled}
    if isinstance(rule, AcceptanceRule):
        found = [] if rule.most_doubt is None else [rule.most_doubt]
        return {"most_doubt": np.array(found, dtype=np.float64)}, {name: getattr(rule, name) for name in _TESTED}
    if isinstance(rule, OutlierRule):
        return {"threshold": np.array([rule.threshold], dtype=np.float64)}, {}
    return {"scores": rule.scores}, {"level": rule.level}


def from_arrays(kind: str, arrays: Mapping[str, NDArray[np.float64]], known: Mapping[str, Any], size: int) -> Rule:
    """Rebuild a rule of this kind for `size` classes.

    Raises:
        KeyError, TypeError, ValueError: the arrays and values do not describe such a rule.
    """
    if kind == SETS:
        thresholds = arrays["thresholds"]
        if thresholds.shape not in ((1,), (size,)):
            raise ValueError(f"thresholds: expected 1 or {size} values; got shape {thresholds.shape}")
        return SetRule(SetScore(**{name: known[name] for name in _SCORE}), thresholds, bool(known["is_filled"]))
    if kind == RISK:
        found = [float(value) for value in arrays["most_doubt"]]
        if len(found) > 1:
            raise ValueError(f"most_doubt: expected at most one number; got {len(found)}")
        return AcceptanceRule(found[0] if found else None, **{name: known[name] for name in _TESTED})
    if kind == OOD:
        return OutlierRule(float(arrays["threshold"].item()))
    if kind != SHIFT:
        raise ValueError(f"expected one of {', '.join(KINDS)}; got {kind!r}")
    scores = arrays["scores"]
    if scores.ndim != 1 or len(scores) == 0 or np.any(np.diff(scores) < 0):
        raise ValueError("scores: expected numbers in ascending order")
    return ShiftRule(scores, float(known["level"]))
