"""The share of examples whose label is among the classes that the ranking keeps."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="ranked accuracy",
    limits=(0, 1),
    place=21,
    told_by=("rule",),
    facts=("threshold",),
    computed_by="ranked_length",
)
