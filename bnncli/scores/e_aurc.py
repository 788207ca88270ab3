"""The area under the risk-coverage curve minus that of a perfect ranking."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="E-AURC", place=13, computed_by="aurc")
