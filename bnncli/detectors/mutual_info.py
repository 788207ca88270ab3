"""The mutual information of class and parameters, its sign turned: Houlsby et al. (2011), arXiv 1112.5745."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), nats."""
    import numpy as np

    return -np.asarray(values, dtype=np.float64)


DETECTOR = Detector(
    place=4,
    of_predictions=of_predictions,
    needs="mutual_info",
    without="this integrator provides no mutual information",
)
