"""The mean over classes of the AUROC of a class against the rest."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="class AUROC", place=10, computed_by="balanced_accuracy")
