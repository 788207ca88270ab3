"""Prediction sets: the classes whose scores are at most a calibrated threshold, shared or one per class.

Split conformal prediction: Papadopoulos et al. (2002). One threshold per class: Vovk (2012), arXiv:1209.2673, section
4.
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

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)  # the grid of Angelopoulos et al. (2021), appendix E


@dataclass(frozen=True)
class SetRule:
    """The set of an example holds the classes whose score is at most the threshold.

    Args:
        thresholds: (1,) or, per class, (K,).
        is_filled: put the most probable class into otherwise empty sets, which can only raise the coverage.
    """

    score: SetScore
    thresholds: NDArray[np.float64]
    is_filled: bool = False

    def sets(self, probs: NDArray, uniform: NDArray | None = None) -> NDArray[np.bool_]:
        """Return which classes are in the set of each example, (n, K). Arguments as in SetScore.of_classes."""
        found: NDArray[np.bool_] = self.score.of_classes(probs, uniform) <= self.thresholds
        if self.is_filled:
            empty = np.flatnonzero(~found.any(axis=1))
            found[empty, np.argmax(probs[empty], axis=1)] = True
        return found

    def set_blocks(self, probs: NDArray, uniform: NDArray | None = None) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
        """Yield blocks of rows and their sets; probs (N, K) may be memory-mapped."""
        for rows in row_blocks(*probs.shape):
            yield rows, self.sets(probs[rows], None if uniform is None else uniform[rows])


def fit_thresholds(
    scores: NDArray, labels: NDArray | None, coverage: float, *, num_classes: int, confidence: float | None = None
) -> NDArray[np.float64]:
    """Return the threshold (1,) for the scores (n,) of the examples' own classes, or (K,) thresholds if labels (n,) are given.

    Raises:
        ValueError: there are too few examples, overall or of a class (see least_for_coverage).
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
    """Return the RAPS score with the smallest sets on these examples, which must not be used for calibration.

    The unpenalised ranks are those that cover enough of the labels; the penalty is the one in PENALTIES that gives the
    smallest sets (Angelopoulos et al. 2021, appendix E). Shapes: probs (m, K), labels (m,), uniform (m,).
    """
    rank = covering_rank(len(labels), coverage) or len(labels)
    free = int(np.sort(label_ranks(probs, labels))[rank - 1])
    choices = [SetScore(RAPS, seed, penalty, free) for penalty in PENALTIES]
    return min(choices, key=lambda score: _mean_size(score, probs, labels, rank=rank, uniform=uniform))


def _mean_size(score: SetScore, probs: NDArray, labels: NDArray, *, rank: int, uniform: NDArray | None) -> float:
    scores = score.of_classes(probs, uniform)
    own = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return float((scores <= np.sort(own)[rank - 1]).sum(axis=1).mean())
