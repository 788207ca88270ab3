"""The mean largest probability on an out-of-distribution split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.scores import Score

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.example_statistics import ExampleStatistics
    from bnncli.evaluation.metric_rows import Row


def of_other_split(examples: ExampleStatistics, ood: str, bootstrap: Bootstrap | None) -> Row:
    """Of its examples alone."""
    from bnncli.evaluation.split_detection import mmc_row

    return mmc_row(examples.confidence, ood=ood, bootstrap=bootstrap)


SCORE = Score(title="MMC", limits=(0, 1), place=27, digits=3, of_other_split=of_other_split)
