"""The share of empty prediction sets of a rule of calibrate."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="empty sets",
    place=42,
    digits=3,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "scheme", "by_class", "confidence"),
)
