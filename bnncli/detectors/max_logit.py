"""The largest logit: Hendrycks et al. (2022), arXiv 1911.11132."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), as it is."""
    import numpy as np

    return np.asarray(values, dtype=np.float64)


DETECTOR = Detector(place=7, of_predictions=of_predictions, needs="max_logit", without="the predictions have no logits")
