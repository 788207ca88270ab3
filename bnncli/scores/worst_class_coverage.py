"""The lowest coverage of a class by the prediction sets of a rule of calibrate."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="worst class",
    place=40,
    digits=3,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "scheme", "by_class", "confidence"),
)
