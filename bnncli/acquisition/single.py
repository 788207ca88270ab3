"""Scores of single examples; the examples with the highest scores are labelled next.

entropy: entropy of the mean probabilities (Shannon). margin: minus the difference of the two largest mean probabilities
(Scheffer, Decomain and Wrobel 2001, doi:10.1007/3-540-44816-0_31). bald: mutual information of label and weights
(Houlsby, Huszar, Ghahramani and Lengyel 2011, arXiv:1112.5745, equation 2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bnncli.errors import UsageError

Array = np.ndarray


def _entropy(probs: Array, mutual_info: Array | None) -> Array:
    p = probs.astype(np.float64)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)


def _margin(probs: Array, mutual_info: Array | None) -> Array:
    two = np.sort(probs.astype(np.float64), axis=1)[:, -2:]
    return two[:, 0] - two[:, 1]


def _bald(probs: Array, mutual_info: Array | None) -> Array:
    if mutual_info is None:
        raise UsageError("\0by\0 bald needs draws, but this posterior or integrator has none: choose another")
    return mutual_info.astype(np.float64)


SCORES: dict[str, Callable[[Array, Array | None], Array]] = {"bald": _bald, "entropy": _entropy, "margin": _margin}
"""Map a name to a function of probs (N, C) and mutual_info (N,) or None that returns scores (N,), in nats except for
margin.
"""


def highest(scores: Array, count: int) -> Array:
    """Return the rows (count,) of the highest scores (N,), highest first, ties by row."""
    return np.argsort(-scores, kind="stable")[:count]
