"""The mean over classes of the average precision of a class against the rest."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="class average precision", place=11, computed_by="balanced_accuracy")
