"""The largest class probability: Hendrycks and Gimpel (2017), arXiv 1610.02136."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), as it is."""
    return examples.confidence


DETECTOR = Detector(place=2, of_predictions=of_predictions)
