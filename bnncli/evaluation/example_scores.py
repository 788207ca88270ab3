"""Scores for out-of-distribution detection that predictions give, (N,), higher for what looks in-distribution.

max_prob and entropy: Hendrycks and Gimpel (2017), arXiv 1610.02136, and the predictive entropy; energy: Liu, Wang, Owens and
Li (2020), arXiv 2010.03759; max_logit: Hendrycks et al. (2022), arXiv 1911.11132; mutual_info: Houlsby et al. (2011), arXiv
1112.5745; dirichlet_variance: the variance of the class probabilities, summed, where the prediction is a Dirichlet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import Examples
from bnncli.evaluation.probabilities import row_blocks
from bnncli.numerics.dirichlet import total_variance

_NEEDED = {
    "mutual_info": ("mutual_info", "this integrator gives no mutual information"),
    "dirichlet_variance": ("log_concentration", "this integrator gives no Dirichlet distribution"),
    "energy": ("energy", "the predictions have no energies"),
    "max_logit": ("max_logit", "the predictions have no logits"),
}


def prediction_scores(
    names: Sequence[str], examples: Examples, arrays: Mapping[str, NDArray | None]
) -> dict[str, NDArray | str]:
    """The scores of these names, as prediction_score gives them."""
    return {name: prediction_score(name, examples, arrays) for name in names}


def prediction_score(name: str, examples: Examples, arrays: Mapping[str, NDArray | None]) -> NDArray[np.float64] | str:
    """One of the scores for each example, (N,), or the reason why these predictions do not give it.

    Args:
        arrays: of the prediction file, where it has them: mutual_info, energy, max_logit (N,), log_concentration (N, C),
            which is read in blocks of rows.
    """
    if name == "max_prob":
        return examples.confidence
    if name == "entropy":
        return -examples.entropy
    needed, reason = _NEEDED[name]
    values = arrays.get(needed)
    if values is None:
        return reason
    if name == "dirichlet_variance":
        blocks = (torch.from_numpy(np.asarray(values[rows])) for rows in row_blocks(*values.shape))
        return np.concatenate([np.empty(0), *(-total_variance(block).numpy() for block in blocks)])
    vector = np.asarray(values, dtype=np.float64)
    return vector if name == "max_logit" else -vector
