"""The share of wrong labels, if an example has several."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(title="Hamming loss", limits=(0, 1), place=1.5, shown_of_labels={}, computed_by="accuracy")
