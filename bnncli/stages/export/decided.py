"""The prediction sets of a rule of calibrate, as a file has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnncli.decisions.prediction_sets import SetRule
from bnncli.errors import DataError, UsageError
from bnncli.exported.parts import HeadParts, with_sets
from bnncli.run.decisions import open_decisions
from bnncli.run.session import Run
from bnncli.storage.decisions import DecisionFile


def open_rule(run: Run, name: str, rule: str, *, posterior: str) -> DecisionFile:
    """A rule of calibrate for the predictions of this name, <posterior>.<integrator>.

    Args:
        posterior: the content digest of the one that is exported.

    Raises:
        MissingInput, DataError: there is none that can be used, or it is of another posterior.
        UsageError: it gives no sets, or draws numbers.
    """
    (found,) = open_decisions(run, name, only=[rule])
    decided = found.rule
    if not isinstance(decided, SetRule) or decided.score.seed is not None:
        why = "draws a number for each example" if isinstance(decided, SetRule) else "gives no prediction sets"
        raise UsageError(
            f"\0decide\0: the rule {rule!r} of {name} {why}; a file has sets of rules that do not",
            code="unsupported_export",
        )
    if found.header.meta["maker"].get("posterior") != posterior:
        message = f"{found.header.path} was calibrated with another posterior than {name.partition('.')[0]}"
        raise DataError(message, code="wrong_posterior", path=found.header.path)
    return found


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
