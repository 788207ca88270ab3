"""The share of the other inputs that a latent binary network selects."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="FPR", limits=(0, 1), place=34, digits=3, is_shown=True, facts=("threshold",))
