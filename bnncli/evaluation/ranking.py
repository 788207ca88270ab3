"""Sets of the most probable classes: coverage compared with a plain rule of the same mean set size.

Hobbhahn (2020), arXiv 2003.01227, Algorithm 1: the uncertainty-aware ranking keeps the classes of each example that
cannot be distinguished (bnncli.numerics.dirichlet). The plain rule keeps the fewest classes whose probabilities sum to
a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup, means
from bnncli.lazy import torch
from bnncli.numerics.dirichlet import cumulative_lengths

NO_RANKING = "the predictions have no ranking; create one with predict \0top_k\0"


def ranking_scores(
    probs: NDArray, examples: ExampleStatistics, lengths: NDArray | None, choices: Mapping[str, Any] | None
) -> list[ScoreGroup]:
    """Return mean length and accuracy of the ranking, accuracy of the plain rule at that mean length, and the difference.

    Replicates keep the lengths of the sample.

    Args:
        probs: (N, C), from which `examples` was computed; may be memory-mapped.
        lengths: (N,) number of classes in the ranking, at least 1; None without a ranking.
        choices: rule, threshold and cap (largest length) of the ranking.
    """
    shared = dict(choices or {})
    length = [ScoreForm("ranked_length", shared, None)]
    accuracy = [
        ScoreForm("ranked_accuracy", shared, True, bounds=(0.0, 1.0)),
        ScoreForm("cumulative_accuracy", shared, True, bounds=(0.0, 1.0)),
        ScoreForm("ranked_gain", shared, True, bounds=(-1.0, 1.0)),
    ]
    if lengths is None:
        return [ScoreGroup(length, None, NO_RANKING), ScoreGroup(accuracy, None, NO_RANKING)]
    found = [means(length, [lengths])]
    if examples.label_rank is None:
        return [*found, ScoreGroup(accuracy, None, NO_LABELS)]
    most = min(int(shared["cap"]), examples.num_classes)
    plain = np.ones(0, dtype=np.int64)
    if len(lengths):
        largest = torch.from_numpy(largest_probabilities(probs, most))
        plain = cumulative_lengths(largest, mean_length=float(np.mean(lengths))).numpy()
    ours, theirs = examples.label_rank < lengths, examples.label_rank < plain
    return [*found, means(accuracy, [ours, theirs, ours.astype(float) - theirs])]


def largest_probabilities(probs: NDArray, count: int) -> Floats:
    """Return the `count` largest probabilities (N, count) of each row of probs (N, C), in descending order."""
    out = np.empty((len(probs), count))
    for rows in row_blocks(*probs.shape):
        out[rows] = -np.partition(-np.asarray(probs[rows]), range(count), axis=1)[:, :count]
    return out
