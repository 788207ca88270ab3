"""The share of an out-of-distribution split that a rule of calibrate calls outliers."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="detected",
    place=47,
    digits=3,
    is_shown=True,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "by", "confidence"),
)
