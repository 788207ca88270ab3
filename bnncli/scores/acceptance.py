"""The share of predictions that a rule of calibrate accepts."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="accepted",
    place=44,
    digits=3,
    is_shown=True,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "confidence"),
)
