"""The area under the precision-recall curve of a score that separates two splits, as average precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.detection import DetectionForm


def of_two_splits() -> list[DetectionForm]:
    """With either side as the positive one."""
    from bnncli.evaluation.detection import DetectionForm, aupr_in, aupr_out

    sides = (("in", aupr_in), ("out", aupr_out))
    return [
        DetectionForm({"positive": side, "estimator": "average precision"}, statistic, higher_is_better=True)
        for side, statistic in sides
    ]


SCORE = Score(
    title="AUPR",
    limits=(0, 1),
    place=25,
    digits=3,
    usual={"positive": "in"},
    told_by=("score", "positive"),
    of_two_splits=of_two_splits,
)
