"""The same share for a plain rule whose sets have the same mean size."""

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
