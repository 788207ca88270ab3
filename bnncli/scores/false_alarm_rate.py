"""The share of in-distribution examples that a rule of calibrate calls outliers."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="false alarms",
    place=46,
    digits=3,
    is_shown=True,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "by", "confidence"),
)
