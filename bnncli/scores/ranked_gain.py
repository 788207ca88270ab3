"""How much more often the ranking's sets contain the label than the plain rule's."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="ranked gain", place=23, told_by=("rule",), facts=("threshold",), computed_by="ranked_length")
