"""The area under the ROC curve of a score that separates two splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.detection import DetectionForm


def of_two_splits() -> list[DetectionForm]:
    """The same whichever side is positive."""
    from bnncli.evaluation.detection import DetectionForm, auroc

    return [DetectionForm({"positive": "in"}, auroc, higher_is_better=True)]


SCORE = Score(
    title="AUROC",
    limits=(0, 1),
    place=24,
    digits=3,
    is_shown=True,
    usual={"positive": "in"},
    told_by=("score", "positive"),
    of_two_splits=of_two_splits,
)
