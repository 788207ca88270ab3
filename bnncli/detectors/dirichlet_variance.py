"""The variance of the class probabilities, summed and its sign turned, where the prediction is a Dirichlet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), from log concentrations (N, C), read in blocks of rows."""
    import numpy as np
    import torch

    from bnncli.evaluation.probabilities import row_blocks
    from bnncli.numerics.dirichlet import total_variance

    assert values is not None
    blocks = (torch.from_numpy(np.asarray(values[rows])) for rows in row_blocks(*values.shape))
    return np.concatenate([np.empty(0), *(-total_variance(block).numpy() for block in blocks)])


DETECTOR = Detector(
    place=4,
    of_predictions=of_predictions,
    needs="log_concentration",
    without="this integrator gives no Dirichlet distribution",
)
