"""The mean over classes of the precision."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="macro precision", place=9, computed_by="balanced_accuracy")
