"""The share of wrong predictions among those a rule of calibrate accepts."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="risk", place=45, is_shown=True, is_of_rule=True, told_by=("rule",), facts=("target", "confidence"))
