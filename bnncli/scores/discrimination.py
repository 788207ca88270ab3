"""The gain of recalibrated forecasts over always forecasting the share of class 1, in Brier score or NLL."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="discrimination", place=15, told_by=("of",), computed_by="miscalibration")
