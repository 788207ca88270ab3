"""Predictions of one split as the scores of a split see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics


@dataclass(frozen=True)
class ScoredPredictions:
    """What scores of one split are made of.

    Args:
        probs: (N, C), what `examples` was made from; may be mapped from a file.
        examples: the numbers of each example.
        mutual_info: (N,) nats, or None.
        lengths: (N,) classes that the uncertainty-aware ranking keeps, or None. ranking: its rule, threshold and cap.
        settings: values of the options that scores bring; what is not among them has its default.
    """

    probs: NDArray
    examples: ExampleStatistics
    mutual_info: NDArray | None = None
    lengths: NDArray | None = None
    ranking: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
