"""Prediction sets: the classes whose scores are at most a threshold that calibration examples set, one for all or one a class.

Split conformal prediction: Papadopoulos et al. (2002); one threshold a class: Vovk (2012), arXiv:1209.2673, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions import RAPS
from bnncli.decisions.levels import covering_rank
from bnncli.decisions.set_scores import SetScore, label_ranks
from bnncli.evaluation.probabilities import row_blocks

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)  # among which Angelopoulos et al. (2021), appendix E, choose


@dataclass(frozen=True)
class SetRule:
    """Which classes are in the set of an example: those whose score is at most the threshold.

    Args:
        thresholds: (1,), or (K,) of each class.
        is_filled: whether a set that would be empty has the most probable class, which only raises the coverage.
    """

    score: SetScore
    thresholds: NDArray[np.float64]
    is_filled: bool = False

    def sets(self, probs: NDArray, uniform: NDArray | None = None) -> NDArray[np.bool_]:
        """(n, K) of probs (n, K): whether a class is in the set. Args as of SetScore.of_classes."""
        found: NDArray[np.bool_] = self.score.of_classes(probs, uniform) <= self.thresholds
        if self.is_filled:
            empty = np.flatnonzero(~found.any(axis=1))
            found[empty, np.argmax(probs[empty], axis=1)] = True
        return found

    def set_blocks(self, probs: NDArray, uniform: NDArray | None = None) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
        """Rows and their sets, some rows at a time; probs (N, K) may be mapped from a file."""
        for rows in row_blocks(*probs.shape):
            yield rows, self.sets(probs[rows], None if uniform is None else uniform[rows])


def fit_thresholds(
    scores: NDArray, labels: NDArray | None, coverage: float, *, num_classes: int, confidence: float | None = None
) -> NDArray[np.float64]:
    """(1,) threshold for scores (n,) of calibration examples' own classes, or (K,) where their labels (n,) are given.

    Raises:
        ValueError: too few examples, of all or of a class (least_for_coverage says how many it takes).
    """
    groups = [scores] if labels is None else [scores[labels == k] for k in range(num_classes)]
    thresholds = []
    for group in groups:
        rank = covering_rank(len(group), coverage, confidence)
        if rank is None:
            raise ValueError(f"{len(group)} examples are too few for coverage {coverage}")
        thresholds.append(np.partition(group, rank - 1)[rank - 1])
    return np.array(thresholds, dtype=np.float64)


def choose_regularisation(
    probs: NDArray, labels: NDArray, coverage: float, *, seed: int | None = None, uniform: NDArray | None = None
) -> SetScore:
    """The score of raps with the smallest sets on these examples, which must not be calibrated on: (m, K), (m,), (m,).

    Free are the ranks that hold the label of enough examples; the penalty is the one of PENALTIES with the smallest sets
    (Angelopoulos et al. 2021, appendix E).
    """
    rank = covering_rank(len(labels), coverage) or len(labels)
    free = int(np.sort(label_ranks(probs, labels))[rank - 1])
    choices = [SetScore(RAPS, seed, penalty, free) for penalty in PENALTIES]
    return min(choices, key=lambda score: _mean_size(score, probs, labels, rank=rank, uniform=uniform))


def _mean_size(score: SetScore, probs: NDArray, labels: NDArray, *, rank: int, uniform: NDArray | None) -> float:
    scores = score.of_classes(probs, uniform)
    own = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return float((scores <= np.sort(own)[rank - 1]).sum(axis=1).mean())
