"""The mean entropy of the class probabilities, nats."""

from __future__ import annotations

from math import inf

from bnncli.scores import Score

SCORE = Score(title="entropy", limits=(0, inf), place=18, computed_by="mean_confidence")
