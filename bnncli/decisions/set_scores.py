"""Nonconformity scores of prediction sets: how badly each class fits an example; low for a class that fits.

LAC: Sadinle, Lei and Wasserman (2019), arXiv:1609.00451. APS: Romano, Sesia and Candes (2020), arXiv:2006.02544.
RAPS: Angelopoulos, Bates, Malik and Jordan (2021), arXiv:2009.14193.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.decisions import LAC, RAPS, SCHEMES
from bnncli.evaluation.probabilities import row_blocks
from bnncli.numerics.random import stream_seed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SetScore:
    """A nonconformity score.

    Args:
        scheme: one of SCHEMES.
        seed: seed of the uniform number that APS and RAPS draw per example to randomise how much of its own probability
            a class uses up, which makes the coverage exact even for probabilities rounded to one. None: use all of it.
        penalty: RAPS penalty on each rank beyond the free ranks (lambda).
        free_ranks: number of unpenalised ranks in RAPS (k_reg).
    """

    scheme: str
    seed: int | None = None
    penalty: float = 0.0
    free_ranks: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}; got {self.scheme!r}")
        if self.seed is not None and self.scheme == LAC:
            raise ValueError("lac does not support randomisation")
        if self.scheme != RAPS and (self.penalty, self.free_ranks) != (0.0, 0):
            raise ValueError(f"{self.scheme} does not support a penalty")

    def uniform(self, split: str, count: int) -> Floats | None:
        """Return the uniform numbers (N,) of a split's examples, equal for all its predictions; None without a seed."""
        if self.seed is None:
            return None
        return np.random.default_rng(stream_seed(self.seed, f"sets/{split}")).random(count)

    def of_classes(self, probs: NDArray, uniform: NDArray | None = None) -> Floats:
        """Return the scores (n, K) of all classes.

        LAC: 1 - p_k. APS: the total probability of the classes ranked before k, plus u p_k. RAPS: APS plus penalty
        max(0, rank - free_ranks). Classes are ranked by probability, ties by class index.

        Args:
            probs: (n, K).
            uniform: (n,) in [0, 1), required if the score has a seed; otherwise u is 1.
        """
        wide = np.asarray(probs, dtype=np.float64)
        if self.scheme == LAC:
            return 1 - wide
        if (self.seed is None) != (uniform is None):
            raise ValueError("expected one uniform number per example if and only if the score has a seed")
        order = np.argsort(-wide, axis=1, kind="stable")
        ordered = np.take_along_axis(wide, order, axis=1)
        used = np.cumsum(ordered, axis=1)
        if uniform is not None:
            used = used - ordered + uniform[:, None] * ordered
        ranks = np.arange(1, wide.shape[1] + 1)
        scores = np.empty_like(wide)
        np.put_along_axis(scores, order, used + self.penalty * np.maximum(0, ranks - self.free_ranks), axis=1)
        return scores

    def of_labels(self, probs: NDArray, labels: NDArray, uniform: NDArray | None = None) -> Floats:
        """Return the scores (N,) of the examples' own classes, equal to those of `of_classes`; probs (N, K) may be memory-mapped."""
        found = np.empty(len(probs))
        for rows in row_blocks(*probs.shape):
            scores = self.of_classes(probs[rows], None if uniform is None else uniform[rows])
            found[rows] = np.take_along_axis(scores, np.asarray(labels[rows], dtype=np.int64)[:, None], axis=1)[:, 0]
        return found


def label_ranks(probs: NDArray, labels: NDArray) -> NDArray[np.int64]:
    """Return the rank (N,) of each example's own class by probability, starting at 1."""
    wide = np.asarray(probs, dtype=np.float64)
    own = np.take_along_axis(wide, labels[:, None], axis=1)
    is_before = (wide == own) & (np.arange(wide.shape[1]) < labels[:, None])
    ranks: NDArray[np.int64] = 1 + (wide > own).sum(axis=1) + is_before.sum(axis=1)
    return ranks
