"""Energy, Mahalanobis distance and nearest neighbours as one score, by Fisher's method: see evaluation/combined_score.py.

Haroush, Frostig, Heller and Soudry (2022), arXiv 2102.12967; Fisher (1932). predict computes it, from the run's features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


FEWEST_ROWS = 20  # of val, whose ranks make the score


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), sums of log p-values."""
    import numpy as np

    return np.asarray(values, dtype=np.float64)


DETECTOR = Detector(
    place=1,
    of_predictions=of_predictions,
    needs="combined",
    without="the predictions have no combined score; predict computes it from the features of train and val",
)
