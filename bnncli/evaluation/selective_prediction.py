"""Selective prediction: the area under the risk-coverage curve, and its excess over that of a perfect ranking.

Geifman, Uziel and El-Yaniv (2019), arXiv 1805.08206, sections 2 and 3. The curve is the error rate among the i most
confident examples, i = 1 to N; the area is its mean. Ties in confidence count as the average over all their orders.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.evaluation.weighted_scores import NO_LABELS, Floats, ScoreForm, ScoreGroup
from bnncli.lazy import special


def selective_scores(examples: ExampleStatistics) -> ScoreGroup:
    """Return AURC and E-AURC by the largest probability, in [0, 1]."""
    choices = {"score": "max_prob"}
    members = [ScoreForm(name, choices, bounds=(0.0, 1.0)) for name in ("aurc", "e_aurc")]
    if examples.is_right is None:
        return ScoreGroup(members, None, NO_LABELS)
    order = np.argsort(-examples.confidence, kind="stable")
    ordered, is_wrong = examples.confidence[order], ~examples.is_right[order]
    places = np.flatnonzero(is_wrong)
    # Groups of equal confidence that contain an error: begin, end and first error of each.
    starts, first = np.unique(np.searchsorted(-ordered, -ordered[places], side="left"), return_index=True)
    ends = np.searchsorted(-ordered, -ordered[starts], side="right")
    harmonic = _harmonic(len(order))
    # An error at position p adds 1/i to the curve at every i >= p: H_N - H_(p - 1); these sums give it for a group.
    summed = np.arange(len(order) + 1) * (harmonic - 1)

    def statistic(weights: NDArray) -> Floats:
        total = len(order)
        if len(places) == 0:
            return np.zeros((len(weights), 2))
        errors = np.add.reduceat(weights[:, order[places]], first, axis=1).astype(np.float64)
        before, after = _cumulative(weights[:, order], starts, ends)
        size = after - before
        areas = size * harmonic[total] - summed[after] + summed[before]
        area = (errors * areas / np.maximum(size, 1)).sum(axis=1) / total
        num_errors = np.rint(errors.sum(axis=1)).astype(np.int64)
        num_right = total - num_errors
        best = (num_errors - num_right * (harmonic[total] - harmonic[num_right])) / total
        return np.stack([area, np.maximum(0.0, area - best)], axis=1)

    return ScoreGroup(members, statistic)


def _harmonic(largest: int) -> Floats:
    """Return the harmonic numbers H_0 to H_largest."""
    found = special.digamma(np.arange(1, largest + 2)) + np.euler_gamma
    found[0] = 0.0
    return found


def _cumulative(weights: NDArray, starts: NDArray, ends: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sums (b, J) of integer weights (b, N) before each start and before each end."""
    num_examples = weights.shape[1]
    edges = np.sort(np.concatenate([[0], starts, ends[ends < num_examples]]), kind="stable")  # ascending parts: a merge
    edges = edges[np.append(True, np.diff(edges) > 0)]  # distinct, since reduceat sums what is between neighbours
    sums = np.zeros((len(weights), len(edges) + 1), dtype=np.int64)
    sums[:, 1:] = np.cumsum(np.rint(np.add.reduceat(weights, edges, axis=1)).astype(np.int64), axis=1)
    places = np.append(edges, num_examples)
    return sums[:, np.searchsorted(places, starts)], sums[:, np.searchsorted(places, ends)]
