"""The mean over classes of the F1 score."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="macro F1", limits=(0, 1), place=8, facts=("num_left_out",), computed_by="balanced_accuracy")
