"""The share of examples whose class is in their prediction set, by a rule of calibrate."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="coverage",
    place=39,
    digits=3,
    is_shown=True,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "scheme", "by_class", "confidence"),
)
