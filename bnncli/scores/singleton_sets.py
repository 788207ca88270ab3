"""The share of prediction sets of a rule of calibrate with one class."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="one class",
    place=43,
    digits=3,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "scheme", "by_class", "confidence"),
)
