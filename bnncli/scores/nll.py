"""The mean negative log probability of the label, nats."""

from __future__ import annotations

from math import inf

from bnncli.scores import Score

SCORE = Score(title="NLL", limits=(0, inf), place=3, is_shown=True, facts=("num_clamped",), computed_by="accuracy")
