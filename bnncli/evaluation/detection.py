"""Out-of-distribution detection from two vectors of scores: AUROC, AUPR and FPR95 for any weights, and their metric rows.

Scores are higher for in-distribution examples. AUROC and AUPR with either side as the positive class: Hendrycks and
Gimpel (2017), arXiv 1610.02136. False positive rate at a true positive rate of 95%: Liang et al. (2018), arXiv
1706.02690, by percentiles of the positives' scores. Weights count how often each example occurs: ones give the
estimate, multinomial counts the bootstrap replicates, both by cumulative sums over scores that are sorted once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import Bootstrap

PERCENT_REJECTED = 5  # of the positives, rejected by the threshold of FPR95
_BLOCK = 2**17  # weights per block of replicates, so that their cumulative sums stay in cache

Row = dict[str, Any]
Floats = NDArray[np.float64]
Statistic = Callable[["WeightedRanking"], Floats]
# Score name to its values (N,), or to the reason for a missing score.
ExampleScores = Mapping[str, NDArray | str]
# Score name to its forms.
Forms = Mapping[str, Sequence["DetectionForm"]]


@dataclass(frozen=True)
class DetectionForm:
    """One form of a detection score.

    Args:
        choices: settings that define the number and distinguish it from the score's other forms.
        statistic: returns the score (b,) for b vectors of weights.
        bounds: range of the score.
    """

    choices: Mapping[str, str]
    statistic: Statistic
    higher_is_better: bool
    bounds: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Ranking:
    """Scores of an in-distribution split (N,) and of another split (M,), sorted once for any number of weights.

    Raises:
        DataError: a split is empty or scores are not finite.
    """

    scores_in: NDArray
    scores_out: NDArray

    def __post_init__(self) -> None:
        for scores in (self.scores_in, self.scores_out):
            if scores.ndim != 1 or len(scores) == 0:
                raise DataError(f"detection: expected one score per example, got shape {scores.shape}")
            if not np.isfinite(scores).all():
                raise DataError("detection: expected finite scores, got NaN or infinity")

    def evaluate(self, statistics: Sequence[Statistic], weights_in: NDArray, weights_out: NDArray) -> Floats:
        """Return the statistics (b, m) for weights (b, N) and (b, M), the counts of each example; every row has a positive sum.

        FPR95 needs integer weights: its percentiles are those of the repeated examples.
        """
        size = max(1, _BLOCK // (len(self.scores_in) + len(self.scores_out)))
        parts = []
        for start in range(0, len(weights_in), size):
            rows = slice(start, start + size)
            weighted = WeightedRanking(self, weights_in[rows], weights_out[rows])
            parts.append(np.stack([statistic(weighted) for statistic in statistics], axis=1))
        return np.concatenate(parts)

    def estimate(self, statistics: Sequence[Statistic]) -> list[float]:
        """Return each statistic with every example counted once."""
        ones = (np.ones((1, len(scores))) for scores in (self.scores_in, self.scores_out))
        values: list[float] = self.evaluate(statistics, *ones)[0].tolist()
        return values

    @cached_property
    def inside(self) -> _Sorted:
        return _Sorted.of(self.scores_in)

    @cached_property
    def outside(self) -> _Sorted:
        return _Sorted.of(self.scores_out)

    @cached_property
    def out_below_in(self) -> NDArray[np.intp]:
        return np.searchsorted(self.outside.scores, self.inside.scores, side="left")

    @cached_property
    def out_upto_in(self) -> NDArray[np.intp]:
        return np.searchsorted(self.outside.scores, self.inside.scores, side="right")

    @cached_property
    def in_upto_out(self) -> NDArray[np.intp]:
        return np.searchsorted(self.inside.scores, self.outside.scores, side="right")

    @cached_property
    def has_no_ties(self) -> bool:
        return bool((self.out_below_in == self.out_upto_in).all())


@dataclass(frozen=True)
class WeightedRanking:
    """A ranking under rows of weights (b, N) and (b, M), from which statistics are computed; sums in float64."""

    ranking: Ranking
    weights_in: NDArray
    weights_out: NDArray

    @cached_property
    def w_in(self) -> NDArray:
        """(b, N), in ascending order of the scores."""
        return self.weights_in.take(self.ranking.inside.order, axis=1)

    @cached_property
    def w_out(self) -> NDArray:
        """(b, M), in ascending order of the scores."""
        return self.weights_out.take(self.ranking.outside.order, axis=1)

    @cached_property
    def below_in(self) -> Floats:
        """(b, N + 1), total weight of in-distribution examples before each position; the last is the total."""
        return _cumulative(self.w_in)

    @cached_property
    def below_out(self) -> Floats:
        """(b, M + 1), total weight of OOD examples before each position; the last is the total."""
        return _cumulative(self.w_out)

    @cached_property
    def total_in(self) -> Floats:
        return self.below_in[:, -1]

    @cached_property
    def total_out(self) -> Floats:
        return self.below_out[:, -1]

    @cached_property
    def lower_out(self) -> Floats:
        """(b, N), weight of the OOD examples that score below each in-distribution example."""
        return self.below_out.take(self.ranking.out_below_in, axis=1)


@dataclass(frozen=True)
class _Sorted:
    """Scores in ascending order, with the sort order and the first and end position of each score's ties."""

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
        """Return the linearly interpolated percentile (b,) of the scores, each repeated by its weight.

        Args:
            below: (b, n + 1), cumulative weights in ascending order of the scores, starting with 0.
        """
        last = below[:, -1] - 1
        whole = percent * last // 100
        low, high = (self.scores[_holder(below, rank)] for rank in (whole, np.minimum(whole + 1, last)))
        return low + (percent * last % 100) / 100 * (high - low)


def _holder(below: Floats, rank: Floats) -> NDArray[np.intp]:
    """Return the position (b,) of the example that holds each row's rank (b,), from 0: the last with below <= rank.

    A binary search in all rows at once; below (b, n + 1) ascends.
    """
    rows = np.arange(len(below))
    low, high = np.zeros(len(below), np.intp), np.full(len(below), below.shape[1] - 1, np.intp)
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_upto = below[rows, middle] <= rank
        low, high = np.where(is_upto, middle, low), np.where(is_upto, high, middle)
    return low


def _cumulative(weights: NDArray) -> Floats:
    """Return the sums (b, n + 1) of the weights (b, n) before each position, float64."""
    sums = np.zeros((len(weights), weights.shape[1] + 1))
    np.cumsum(weights, axis=1, dtype=np.float64, out=sums[:, 1:])
    return sums


def _average_precision(weights: NDArray, true: Floats, false: Floats) -> Floats:
    """Return the sum (b,) of each positive's weight times the precision at its threshold.

    Args:
        weights: (b, n) of the positives.
        true, false: (b, n), weight of the positives and negatives accepted at each positive's threshold.
    """
    # If nothing is accepted, the positive itself has weight 0.
    return np.einsum("bn,bn->b", weights, true / np.maximum(true + false, np.finfo(np.float64).tiny))


def auroc(given: WeightedRanking) -> Floats:
    """Return the probability (b,) that an in-distribution example scores higher than an OOD one; ties count half."""
    # tied pairs count half
    ranking, lower = given.ranking, given.lower_out
    ties = 0.0 if ranking.has_no_ties else given.below_out.take(ranking.out_upto_in, axis=1) - lower
    pairs = np.einsum("bn,bn->b", given.w_in, lower + 0.5 * ties)
    return pairs / (given.total_in * given.total_out)


def aupr_in(given: WeightedRanking) -> Floats:
    """Return the average precision (b,) with in-distribution as the positive class; tied scores share one threshold."""
    found = given.total_in[:, None] - given.below_in.take(given.ranking.inside.first, axis=1)
    false = given.total_out[:, None] - given.lower_out
    return _average_precision(given.w_in, found, false) / given.total_in


def aupr_out(given: WeightedRanking) -> Floats:
    """Return the average precision (b,) with OOD as the positive class."""
    found = given.below_out.take(given.ranking.outside.end, axis=1)
    # in-distribution examples that score at most as high
    false = given.below_in.take(given.ranking.in_upto_out, axis=1)
    return _average_precision(given.w_out, found, false) / given.total_out


def fpr95_in(given: WeightedRanking) -> Floats:
    """Return the share (b,) of OOD examples at or above the threshold that 95% of in-distribution examples reach."""
    threshold = given.ranking.inside.percentile(given.below_in, PERCENT_REJECTED)
    place = np.searchsorted(given.ranking.outside.scores, threshold, side="left")
    return (given.total_out - given.below_out[np.arange(len(place)), place]) / given.total_out


def fpr95_out(given: WeightedRanking) -> Floats:
    """Return the share (b,) of in-distribution examples at or below the threshold that 95% of OOD examples stay under."""
    threshold = given.ranking.outside.percentile(given.below_out, 100 - PERCENT_REJECTED)
    place = np.searchsorted(given.ranking.inside.scores, threshold, side="right")
    return given.below_in[np.arange(len(place)), place] / given.total_in


def form_rows(forms: Forms) -> list[tuple[Row, DetectionForm]]:
    """Return every form with its row, complete except for the value."""
    return [
        ({"name": name, **form.choices, "higher_is_better": form.higher_is_better}, form)
        for name, own in forms.items()
        for form in own
    ]


def detection_rows(
    scores_in: ExampleScores,
    scores_out: ExampleScores,
    forms: Forms,
    *,
    split: str,
    ood: str,
    bootstrap: Bootstrap | None = None,
) -> list[Row]:
    """Return rows of every form and score, between an in-distribution split and another split.

    Args:
        scores_in: name to (N,), higher for in-distribution examples, or to the reason for a missing score.
        scores_out: the same names, (M,).
        forms: forms of auroc, fpr95 and so on.
        split, ood: names of the two splits; each is resampled separately.
        bootstrap: None for rows without standard errors.

    Raises:
        DataError: scores are not finite.
    """
    reasons = {name: _why_undefined(scores_in[name], scores_out[name], ood) for name in scores_in}
    rankings = {
        name: Ranking(np.asarray(scores_in[name]), np.asarray(scores_out[name]))
        for name, reason in reasons.items()
        if reason is None
    }
    defined = form_rows(forms)
    statistics = [form.statistic for _, form in defined]
    replicates = {} if bootstrap is None else _replicates(rankings, statistics, bootstrap, split=split, ood=ood)
    rows = []
    for name, reason in reasons.items():
        shared = {"score": name, "ood": ood, "n": _sizes(scores_in[name], scores_out[name])}
        if reason is not None:
            rows += [{**choices, **shared, "value": None, "undefined": reason} for choices, _ in defined]
            continue
        values = rankings[name].estimate(statistics)
        sizes = (split, len(rankings[name].scores_in)), (ood, len(rankings[name].scores_out))
        for index, ((choices, form), value) in enumerate(zip(defined, values, strict=True)):
            row = {**choices, **shared, "value": value}
            if bootstrap is not None:
                row |= bootstrap.describe(value, replicates[name][:, index], splits=sizes, bounds=form.bounds)
            rows.append(row)
    return rows


def _replicates(
    rankings: Mapping[str, Ranking], statistics: Sequence[Statistic], bootstrap: Bootstrap, *, split: str, ood: str
) -> dict[str, NDArray[np.float64]]:
    """Return the replicates (R, m) of each score's statistics, all with the same weights."""
    if not rankings:
        return {}
    values = resample_rankings(
        list(rankings.values()),
        lambda some: lambda *weights: np.stack([one.evaluate(statistics, *weights) for one in some], axis=1),
        bootstrap,
        split=split,
        ood=ood,
    )
    return {name: values[:, index] for index, name in enumerate(rankings)}


def resample_rankings(
    rankings: Sequence[Ranking],
    statistic_of: Callable[[Sequence[Ranking]], Callable[..., NDArray]],
    bootstrap: Bootstrap,
    *,
    split: str,
    ood: str,
) -> NDArray[np.float64]:
    """Return the replicates (R, ...) of a statistic of rankings of the same examples; of a part of large splits.

    Args:
        statistic_of: returns the function of weights for some rankings.
    """
    sizes = (split, len(rankings[0].scores_in)), (ood, len(rankings[0].scores_out))

    def take(rows_in: NDArray, rows_out: NDArray) -> Callable[..., NDArray]:
        return statistic_of([Ranking(one.scores_in[rows_in], one.scores_out[rows_out]) for one in rankings])

    return bootstrap.replicates(statistic_of(rankings), *sizes, take=take)


def _why_undefined(scores_in: NDArray | str, scores_out: NDArray | str, ood: str) -> str | None:
    """Return why detection is undefined, or None."""
    for scores in (scores_in, scores_out):
        if isinstance(scores, str):
            return scores
    if len(scores_in) == 0:
        return "the in-distribution split is empty"
    return f"only one class is present: split {ood} is empty" if len(scores_out) == 0 else None


def _sizes(scores_in: NDArray | str, scores_out: NDArray | str) -> list[int] | None:
    if isinstance(scores_in, str) or isinstance(scores_out, str):
        return None
    return [len(scores_in), len(scores_out)]
