"""The same of a plain rule whose sets are as large on average."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="cumulative accuracy",
    limits=(0, 1),
    place=22,
    told_by=("rule",),
    facts=("threshold",),
    computed_by="ranked_length",
)
