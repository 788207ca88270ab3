"""The mean squared distance between the probabilities and the one-hot label, summed over classes."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="Brier", limits=(0, 2), place=4, is_shown=True, computed_by="accuracy")
