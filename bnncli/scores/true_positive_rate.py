"""The share of the true inputs that a latent binary network selects."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="TPR", place=33, digits=3, is_shown=True, facts=("threshold",))
