"""The false positive rate at 95% true positives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.detection import DetectionForm


def of_two_splits() -> list[DetectionForm]:
    """With either side as the one that is recognised."""
    from bnncli.evaluation.detection import DetectionForm, fpr95_in, fpr95_out

    inside, outside = (
        "5th percentile of in-distribution scores, linear",
        "95th percentile of out-of-distribution scores, linear",
    )
    return [
        DetectionForm({"positive": "in", "threshold": inside}, fpr95_in, higher_is_better=False),
        DetectionForm({"positive": "out", "threshold": outside}, fpr95_out, higher_is_better=False),
    ]


SCORE = Score(
    title="FPR95",
    limits=(0, 1),
    place=26,
    digits=3,
    is_shown=True,
    usual={"positive": "in"},
    told_by=("score", "positive"),
    facts=("threshold",),
    of_two_splits=of_two_splits,
)
