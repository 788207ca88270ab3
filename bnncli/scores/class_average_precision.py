"""The mean over classes of the average precision of a class against the rest."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="class average precision",
    limits=(0, 1),
    place=11,
    usual={"average": "macro"},
    told_by=("average",),
    facts=("num_left_out",),
    shown_of_labels={"average": "macro"},
    computed_by="balanced_accuracy",
)
