"""The mean number of classes in the prediction sets of a rule of calibrate."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="set size",
    place=41,
    digits=2,
    is_shown=True,
    is_of_rule=True,
    told_by=("rule",),
    facts=("target", "scheme", "by_class", "confidence"),
)
