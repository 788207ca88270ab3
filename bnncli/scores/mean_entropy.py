"""The mean entropy of the class probabilities, nats."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="entropy", place=18, computed_by="mean_confidence")
