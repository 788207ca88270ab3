"""The Brier score or NLL of always forecasting the share of class 1."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="uncertainty", place=16, told_by=("of",), computed_by="miscalibration")
