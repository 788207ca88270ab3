"""The p-value of a split against the calibration split of a rule of calibrate; small if the split has shifted."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="shift p", place=48, is_shown=True, is_of_rule=True, told_by=("rule",), facts=("target", "by"))
