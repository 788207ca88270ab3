"""The entropy of the class probabilities, its sign turned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), nats."""
    return -examples.entropy


DETECTOR = Detector(place=3, of_predictions=of_predictions)
