"""The mean over classes of the precision."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="macro precision", limits=(0, 1), place=9, facts=("num_left_out",), computed_by="balanced_accuracy")
