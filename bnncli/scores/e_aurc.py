"""The area under the risk-coverage curve above that of a perfect order."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="E-AURC", place=13, computed_by="aurc")
