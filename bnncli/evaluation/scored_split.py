"""Predictions of one split as the scores of a split see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from bnncli.evaluation.calibration import NUM_BINS
from bnncli.evaluation.example_statistics import Examples

TOP_K = 5


@dataclass(frozen=True)
class ScoredSplit:
    """What scores of one split are made of, and the numbers that some of them are set by.

    Args:
        probs: (N, C), what `examples` was made from; may be mapped from a file.
        examples: the numbers of each example.
        mutual_info: (N,) nats, or None.
        lengths: (N,) classes that the uncertainty-aware ranking keeps, or None. ranking: its rule, threshold and cap.
        num_bins: bins of the calibration errors.
        top_k: k of the top-k accuracy.
    """

    probs: NDArray
    examples: Examples
    mutual_info: NDArray | None = None
    lengths: NDArray | None = None
    ranking: Mapping[str, Any] | None = None
    num_bins: int = NUM_BINS
    top_k: int = TOP_K
