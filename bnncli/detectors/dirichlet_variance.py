"""The variance of the class probabilities, or of each label's, summed and its sign turned, where the prediction is a Dirichlet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.detectors import Detector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.example_statistics import ExampleStatistics


def of_predictions(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """(N,), from log concentrations (N, C), or (N, C, 2) of each label's Beta, read in blocks of rows."""
    import numpy as np
    import torch

    from bnncli.evaluation.probabilities import row_blocks
    from bnncli.numerics.dirichlet import total_variance

    assert values is not None
    found = [np.empty(0)]
    for rows in row_blocks(len(values), math.prod(values.shape[1:])):
        block = torch.from_numpy(np.asarray(values[rows]))
        if block.ndim == 3:  # a label and its absence have the same variance
            found.append(-total_variance(block.flatten(0, 1)).view(block.shape[:2]).sum(dim=1).numpy() / 2)
        else:
            found.append(-total_variance(block).numpy())
    return np.concatenate(found)


DETECTOR = Detector(
    place=5,
    of_predictions=of_predictions,
    needs="log_concentration",
    without="this integrator provides no Dirichlet distribution",
)
