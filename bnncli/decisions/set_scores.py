"""How badly each class fits an example: the scores that prediction sets are made of, low for a class that fits.

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
    """One of the scores.

    Args:
        scheme: of SCHEMES.
        seed: of a uniform number an example that says how much of its own probability a class has used up: of aps and raps, whose
            coverage is exact by it also where probabilities are rounded to one. None: all of it.
        penalty: of raps, of each rank beyond the free ones (lambda). free_ranks: those without one (k_reg).
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
        """The numbers (N,) of the examples of a split, the same for every prediction of it; None where there are none."""
        if self.seed is None:
            return None
        return np.random.default_rng(stream_seed(self.seed, f"sets/{split}")).random(count)

    def of_classes(self, probs: NDArray, uniform: NDArray | None = None) -> Floats:
        """Scores (n, K) of every class.

        LAC: 1 - p_k. APS: the probability of all classes that come before k, and u p_k. RAPS: that, and penalty max(0, rank - free).
        Classes come in the order of their probability; among equals in their own.

        Args:
            probs: (n, K).
            uniform: (n,) in [0, 1), where the score has a seed; u is 1 otherwise.
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
        """Scores (N,) of each example's own class, the same numbers as `of_classes` has; probs (N, K) may be mapped from a file."""
        found = np.empty(len(probs))
        for rows in row_blocks(*probs.shape):
            scores = self.of_classes(probs[rows], None if uniform is None else uniform[rows])
            found[rows] = np.take_along_axis(scores, np.asarray(labels[rows], dtype=np.int64)[:, None], axis=1)[:, 0]
        return found


def label_ranks(probs: NDArray, labels: NDArray) -> NDArray[np.int64]:
    """Place (N,) of each example's own class in the order of probability, from 1 on."""
    wide = np.asarray(probs, dtype=np.float64)
    own = np.take_along_axis(wide, labels[:, None], axis=1)
    is_before = (wide == own) & (np.arange(wide.shape[1]) < labels[:, None])
    ranks: NDArray[np.int64] = 1 + (wide > own).sum(axis=1) + is_before.sum(axis=1)
    return ranks
