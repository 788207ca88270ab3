"""The largest gap between confidence and accuracy over the bins."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="MCE",
    limits=(0, 1),
    place=6,
    usual={"strategy": "equal-width"},
    told_by=("strategy",),
    has_floor=True,
    computed_by="ece",
)
