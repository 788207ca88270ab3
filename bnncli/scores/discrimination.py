"""What recalibrated forecasts gain on the share of class 1, of the Brier score or the NLL."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="discrimination", place=15, told_by=("of",), computed_by="miscalibration")
