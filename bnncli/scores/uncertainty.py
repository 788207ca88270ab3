"""The Brier score or the NLL of forecasting the share of class 1 always."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="uncertainty", place=16, told_by=("of",), computed_by="miscalibration")
