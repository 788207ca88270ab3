"""The free energy of the logits, its sign turned: Liu, Wang, Owens and Li (2020), arXiv 2010.03759."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,)."""
    import numpy as np

    return -np.asarray(values, dtype=np.float64)


DETECTOR = Detector(place=6, of_predictions=of_predictions, needs="energy", without="the predictions have no energies")
