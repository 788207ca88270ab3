"""Out-of-distribution detection from two vectors of scores: AUROC, AUPR and FPR95, for any weights of the examples.

A score is higher for what looks in-distribution. Hendrycks and Gimpel (2017), arXiv 1610.02136: AUROC and AUPR with
either side as the positive class; the false positive rate at a true positive rate of 95 % is that of Liang et al. (2018),
arXiv 1706.02690, by percentiles of the positives' scores. Weights are how often each example occurs: ones give the
estimate, multinomial counts the bootstrap's replicates, by the same cumulative sums over scores that are sorted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError

PERCENT_REJECTED = 5  # of the positives, by the threshold of FPR95
_BLOCK = 2**17  # weights of one block of replicates, so that its cumulative sums stay in cache

Floats = NDArray[np.float64]


class Detection(NamedTuple):
    """Scores of detection, one of each (b,) for b vectors of weights.

    auroc: probability that an in-distribution example scores higher than an out one; ties count half.
    aupr_in, aupr_out: average precision with the in- or the out-distribution as positives; tied scores are one threshold.
    fpr95_in: share of out examples at or above the threshold that 95 % of the in-distribution reach.
    fpr95_out: share of in-distribution examples at or below the threshold under which 95 % of the out examples lie.
    """

    auroc: Floats
    aupr_in: Floats
    aupr_out: Floats
    fpr95_in: Floats
    fpr95_out: Floats


@dataclass(frozen=True)
class Ranking:
    """Scores of an in-distribution split (N,) and of another split (M,), sorted once for any number of weights.

    Raises:
        DataError: a split without examples, or scores that are not finite.
    """

    scores_in: NDArray
    scores_out: NDArray

    def __post_init__(self) -> None:
        for scores in (self.scores_in, self.scores_out):
            if scores.ndim != 1 or len(scores) == 0:
                raise DataError(f"detection: expected one score for each example, got shape {scores.shape}")
            if not np.isfinite(scores).all():
                raise DataError("detection: expected finite scores, got NaN or infinity")

    def evaluate(self, weights_in: NDArray, weights_out: NDArray) -> Detection:
        """All scores under weights (b, N) and (b, M): how often each example occurs, each row's sum positive.

        Weights are whole numbers for FPR95, whose percentiles are those of the examples repeated that often.
        """
        size = max(1, _BLOCK // (len(self.scores_in) + len(self.scores_out)))
        parts = [
            self._evaluate_block(weights_in[start : start + size], weights_out[start : start + size])
            for start in range(0, len(weights_in), size)
        ]
        return Detection(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def estimate(self) -> dict[str, float]:
        """Each score of the examples as they are, every one once, by its name in Detection."""
        ones = self.evaluate(*(np.ones((1, len(scores))) for scores in (self.scores_in, self.scores_out)))
        return {name: float(value[0]) for name, value in ones._asdict().items()}

    def _evaluate_block(self, weights_in: NDArray, weights_out: NDArray) -> Detection:
        """The scores of a few rows of weights; sums in float64."""
        inside, outside = self._inside, self._outside
        w_in, w_out = weights_in.take(inside.order, axis=1), weights_out.take(outside.order, axis=1)
        below_in, below_out = _cumulative(w_in), _cumulative(w_out)
        total_in, total_out = below_in[:, -1:], below_out[:, -1:]
        lower_out = below_out.take(self._out_below_in, axis=1)  # of out examples with a lower score than each in one
        upto_in = below_in.take(self._in_upto_out, axis=1)  # of in examples with at most the score of each out one
        # Out examples as high as an in one are counted with the half that stands above and the half below.
        ties = 0.0 if self._has_no_ties else below_out.take(self._out_upto_in, axis=1) - lower_out
        pairs = np.einsum("bn,bn->b", w_in, lower_out + 0.5 * ties)
        found_in = total_in - below_in.take(inside.first, axis=1)
        found_out = below_out.take(outside.end, axis=1)
        return Detection(
            auroc=pairs / (total_in * total_out)[:, 0],
            aupr_in=_average_precision(w_in, found_in, total_out - lower_out) / total_in[:, 0],
            aupr_out=_average_precision(w_out, found_out, upto_in) / total_out[:, 0],
            fpr95_in=self._share_from(inside.percentile(below_in, PERCENT_REJECTED), below_out),
            fpr95_out=self._share_upto(outside.percentile(below_out, 100 - PERCENT_REJECTED), below_in),
        )

    def _share_from(self, threshold: Floats, below_out: Floats) -> Floats:
        """Share (b,) of the out examples' weight at or above each row's threshold."""
        place, total = np.searchsorted(self._outside.scores, threshold, side="left"), below_out[:, -1]
        return (total - below_out[np.arange(len(total)), place]) / total

    def _share_upto(self, threshold: Floats, below_in: Floats) -> Floats:
        """Share (b,) of the in-distribution examples' weight at or below each row's threshold."""
        place, total = np.searchsorted(self._inside.scores, threshold, side="right"), below_in[:, -1]
        return below_in[np.arange(len(total)), place] / total

    @cached_property
    def _inside(self) -> _Sorted:
        return _Sorted.of(self.scores_in)

    @cached_property
    def _outside(self) -> _Sorted:
        return _Sorted.of(self.scores_out)

    @cached_property
    def _out_below_in(self) -> NDArray[np.intp]:
        return np.searchsorted(self._outside.scores, self._inside.scores, side="left")

    @cached_property
    def _out_upto_in(self) -> NDArray[np.intp]:
        return np.searchsorted(self._outside.scores, self._inside.scores, side="right")

    @cached_property
    def _in_upto_out(self) -> NDArray[np.intp]:
        return np.searchsorted(self._inside.scores, self._outside.scores, side="right")

    @cached_property
    def _has_no_ties(self) -> bool:
        return bool((self._out_below_in == self._out_upto_in).all())


@dataclass(frozen=True)
class _Sorted:
    """Scores in ascending order: the order, and for each where its ties begin and where they end."""

    scores: NDArray
    order: NDArray[np.intp]
    first: NDArray[np.intp]
    end: NDArray[np.intp]

    @classmethod
    def of(cls, scores: NDArray) -> _Sorted:
        order = np.argsort(scores, kind="stable")
        ordered = scores[order]
        first, end = (np.searchsorted(ordered, ordered, side=side) for side in ("left", "right"))
        return cls(ordered, order, first, end)

    def percentile(self, below: Floats, percent: int) -> Floats:
        """The linearly interpolated percentile (b,) of the scores, each repeated as often as its weight says.

        Args:
            below: (b, n + 1), cumulative weights in ascending order of the scores, a zero first.
        """
        last = below[:, -1] - 1
        whole = percent * last // 100
        low, high = (self.scores[_holder(below, rank)] for rank in (whole, np.minimum(whole + 1, last)))
        return low + (percent * last % 100) / 100 * (high - low)


def _holder(below: Floats, rank: Floats) -> NDArray[np.intp]:
    """The place (b,) of the example that holds each row's rank (b,), counted from 0: the last with below <= rank.

    A search by halves in all rows at once; below (b, n + 1) ascends.
    """
    rows = np.arange(len(below))
    low, high = np.zeros(len(below), np.intp), np.full(len(below), below.shape[1] - 1, np.intp)
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_upto = below[rows, middle] <= rank
        low, high = np.where(is_upto, middle, low), np.where(is_upto, high, middle)
    return low


def _cumulative(weights: NDArray) -> Floats:
    """Sums (b, n + 1) of the weights (b, n) before each place, float64."""
    sums = np.zeros((len(weights), weights.shape[1] + 1))
    np.cumsum(weights, axis=1, dtype=np.float64, out=sums[:, 1:])
    return sums


def _average_precision(weights: NDArray, true: Floats, false: Floats) -> Floats:
    """Sum (b,) of each positive's weight times the precision at its own threshold.

    Args:
        weights: (b, n) of the positives.
        true, false: (b, n), weight of the positives and of the negatives that the threshold at each positive accepts.
    """
    # Where nothing is accepted the positive itself has no weight.
    return np.einsum("bn,bn->b", weights, true / np.maximum(true + false, np.finfo(np.float64).tiny))
