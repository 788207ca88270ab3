"""Out-of-distribution detection by the largest class probability: AUROC and FPR95.

Hendrycks and Gimpel (2017), arXiv 1610.02136: in-distribution examples are the positives, the score is the
largest class probability.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

IN_PERCENTILE = 5.0  # the threshold leaves 95 % of the in-distribution scores at or above it


def confidence(probs: NDArray) -> NDArray[np.float64]:
    """Largest class probability (N,) of probs (N, C)."""
    return np.max(probs, axis=1).astype(np.float64)


def auroc(probs_in: NDArray, probs_out: NDArray) -> float:
    """Probability that an in-distribution example is more confident than an out one; ties count half.

    Args:
        probs_in: (N, C) of the in-distribution split.
        probs_out: (M, C) of the other split.
    """
    scores = np.concatenate([confidence(probs_in), confidence(probs_out)])
    is_in = np.concatenate([np.ones(len(probs_in), dtype=int), np.zeros(len(probs_out), dtype=int)])
    return float(roc_auc_score(is_in, scores))


def fpr95(probs_in: NDArray, probs_out: NDArray) -> float:
    """Fraction of out examples accepted at the threshold that accepts 95 % of the in-distribution ones.

    The threshold is the 5th percentile of the in-distribution scores, linearly interpolated; a score that
    equals it is accepted. Identical scores give 0.95, scores that are all equal give 1.

    Args:
        probs_in: (N, C) of the in-distribution split.
        probs_out: (M, C) of the other split.
    """
    threshold = np.percentile(confidence(probs_in), IN_PERCENTILE)
    return float(np.mean(confidence(probs_out) >= threshold))
