"""Decision rules with guarantees: prediction sets, acceptance, one class, outliers, shift; calibrated on examples that chose nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.statistics import NO_LABELS, Floats, ScoreForm, ScoreGroup, means, row_blocks
from bnncli.lazy import np, special
from bnncli.numerics.random import stream_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def covering_rank(num_scores: int, coverage: float, confidence: float | None = None) -> int | None:
    """Return the smallest k such that scores up to the k-th smallest have the coverage; None if no k does.

    Args:
        coverage: in (0, 1).
        confidence: share of calibration sets that must each reach the coverage. None: reach it on average over
            calibration sets, k = ceil((n + 1) coverage).
    """
    if confidence is None:
        rank = math.ceil((num_scores + 1) * exact_level(coverage))
        return rank if rank <= num_scores else None
    low, high = 1, num_scores + 1  # coverage grows with k
    while low < high:
        middle = (low + high) // 2
        has_it = float(special.bdtr(middle - 1, num_scores, coverage)) >= confidence
        low, high = (low, middle) if has_it else (middle + 1, high)
    return low if low <= num_scores else None


def excluding_rank(num_scores: int, rate: float, confidence: float | None = None) -> int | None:
    """Return the largest k such that scores below the k-th smallest have at most this rate; None if no k does.

    Args:
        rate: in (0, 1).
        confidence: share of calibration sets that must each keep the rate. None: keep it on average over calibration
            sets, k = floor((n + 1) rate).
    """
    if confidence is None:
        return math.floor((num_scores + 1) * exact_level(rate)) or None
    low, high = 0, num_scores  # the rate grows with k
    while low < high:
        middle = (low + high + 1) // 2
        has_it = float(special.betainc(middle, num_scores + 1 - middle, rate)) >= confidence
        low, high = (middle, high) if has_it else (low, middle - 1)
    return low or None


def min_scores_for_coverage(coverage: float, confidence: float | None = None) -> int:
    """Return the number of scores needed for a threshold of this coverage."""
    return _least(1 - exact_level(coverage), confidence)


def min_scores_for_rate(rate: float, confidence: float | None = None) -> int:
    """Return the number of scores needed for a threshold of this false-alarm rate."""
    return _least(exact_level(rate), confidence)


def _least(missed: Fraction, confidence: float | None) -> int:
    """Return the smallest n such that the largest (or smallest) score excludes at most this share of new scores."""
    if confidence is None:
        return math.ceil(1 / missed) - 1
    least = max(1, math.floor(math.log1p(-confidence) / math.log1p(-float(missed))))
    while -math.expm1(least * math.log1p(-float(missed))) < confidence:  # at most one step, due to rounded logarithms
        least += 1
    return least


def exact_level(level: float) -> Fraction:
    """Return the level as the decimal number the user typed, so that rounding never shifts (n + 1) 0.1 by a rank."""
    return Fraction(repr(float(level)))


_ROUNDING = 1e-12  # relative, of sums of weights


def fit_group_threshold(
    scores: NDArray, groups: RowGroups, coverage: float, confidence: float | None = None
) -> float | None:
    """Return the smallest of the scores (n,) up to which a random row of a new group has the coverage; None if none is.

    Without a confidence, on average over calibration sets: each of the G groups has mass 1 / (G + 1), shared equally by
    its rows, and the rest is infinite (hierarchical conformal prediction: Lee, Barber and Willett 2023,
    arXiv:2306.06342; Dunn, Wasserman and Ramdas 2022). Otherwise, for this share of calibration sets: the groups' mean
    losses are independent and bounded, and fall as the threshold rises (Bates et al. 2021, arXiv:2101.02703).
    """
    if len(scores) == 0:
        return None
    shares = groups.spread(1 / groups.sizes)
    if confidence is None:
        return fit_weighted_threshold(scores, shares, 1.0, coverage)
    order = np.argsort(scores, kind="stable")
    losses = 1 - np.cumsum(shares[order]) / len(groups)
    p_values = bounded_mean_p_values(losses, len(groups), float(1 - exact_level(coverage)))
    enough = np.flatnonzero(p_values <= (1 - confidence) * (1 + _ROUNDING))
    return float(np.asarray(scores, dtype=np.float64)[order][enough[0]]) if len(enough) else None


def bounded_mean_p_values(means: NDArray, size: int, limit: float) -> NDArray[np.float64]:
    """Return p-values (m,) of the hypotheses that `size` independent values in [0, 1] with these means (m,) expect more than `limit`.

    The smaller of the bounds of Hoeffding and Bentkus, as in Bates et al. (2021), theorem 4.
    """
    found = np.clip(np.asarray(means, dtype=np.float64), 0.0, 1.0)
    low = np.minimum(found, limit)
    divergence = special.xlogy(low, low / limit) + special.xlogy(1 - low, (1 - low) / (1 - limit))
    bentkus = math.e * special.bdtr(np.minimum(np.ceil(size * found - 1e-9), size), size, limit)
    p_values: NDArray[np.float64] = np.minimum(1.0, np.minimum(np.exp(-size * divergence), bentkus))
    return p_values


SetScores: TypeAlias = "NDArray[np.float64]"


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

    def uniform(self, split: str, count: int) -> SetScores | None:
        """Return the uniform numbers (N,) of a split's examples, equal for all its predictions; None without a seed."""
        if self.seed is None:
            return None
        return np.random.default_rng(stream_seed(self.seed, f"sets/{split}")).random(count)

    def of_classes(self, probs: NDArray, uniform: NDArray | None = None) -> SetScores:
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

    def of_labels(self, probs: NDArray, labels: NDArray, uniform: NDArray | None = None) -> SetScores:
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


def pool_rare_classes(counts: NDArray, least: int) -> list[int]:
    """Return the classes that share one threshold because they have too few examples, given the counts (K,).

    These are the classes with fewer than `least` examples, and the next smallest ones until the pool has that many. All
    of the pool together has the coverage, as in a cluster of Ding et al. (2023, arXiv:2306.09335).
    """
    order, size = np.argsort(counts, kind="stable"), int((np.asarray(counts) < least).sum())
    totals = np.cumsum(np.asarray(counts)[order])
    while 0 < size < len(order) and totals[size - 1] < least:
        size += 1
    return sorted(order[:size].tolist())


def fit_thresholds(
    scores: NDArray,
    labels: NDArray | None,
    coverage: float,
    *,
    num_classes: int,
    confidence: float | None = None,
    pooled: Sequence[int] = (),
    groups: RowGroups | None = None,
) -> NDArray[np.float64]:
    """Return the threshold (1,) for the scores (n,) of the examples' own classes, or (K,) thresholds if labels (n,) are given.

    Args:
        pooled: classes that share one threshold.
        groups: groups of dependent examples, or None; see fit_group_threshold.

    Raises:
        ValueError: there are too few examples or groups, overall or of a class (see least_for_coverage).
    """
    parts = [np.arange(len(scores))]
    if labels is not None:
        members = [pooled if k in pooled else [k] for k in range(num_classes)]
        parts = [np.flatnonzero(np.isin(labels, own)) for own in members]
    thresholds = []
    for rows in parts:
        own = scores[rows]
        if groups is not None:
            threshold = fit_group_threshold(own, groups.of_rows(rows), coverage, confidence)
        else:
            rank = covering_rank(len(own), coverage, confidence)
            threshold = None if rank is None else float(np.partition(own, rank - 1)[rank - 1])
        if threshold is None:
            raise ValueError(f"{len(own)} examples are too few for coverage {coverage}")
        thresholds.append(threshold)
    return np.array(thresholds, dtype=np.float64)


def fit_weighted_threshold(scores: NDArray, weights: NDArray, bound: float, coverage: float) -> float | None:
    """Return the threshold for scores (n,) whose examples have density ratios (n,) to those that are decided on.

    This is weighted conformal prediction (Tibshirani et al. 2019, arXiv:1904.06019, corollary 1). The ratio at the new
    example enters as `bound`, the largest ratio there is, so one threshold serves all of them and can only be larger.
    None if the weights are too small for this coverage.
    """
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(np.asarray(weights, dtype=np.float64)[order])
    enough = np.flatnonzero(reached >= coverage * (reached[-1] + bound) * (1 - _ROUNDING))
    return float(np.asarray(scores, dtype=np.float64)[order][enough[0]]) if len(enough) else None


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


@cache
def doubts() -> NDArray[np.float64]:
    """Return thresholds on the doubt (1 - confidence), from strict to lenient: twenty per decade, down to float32 resolution."""
    found: NDArray[np.float64] = 10.0 ** (-np.arange(120, -1, -1) / 20)
    return found


# every tenth threshold gets a share of the level; those between only inherit level, so a finer grid costs nothing
_STARTS = 10
_NUM_SHARES = 13  # of 121 thresholds
_CLASS_STARTS, NUM_CLASS_SHARES = 20, 9  # likewise of class_thresholds: a class may have few examples


@dataclass(frozen=True)
class AcceptanceRule:
    """A threshold that decides which predictions to accept.

    Args:
        most_doubt: largest accepted doubt (1 - largest probability); None accepts no prediction, for lack of evidence.
        num_accepted, num_wrong: counts on the calibration examples.
        level: level at which the risk at the threshold was tested.
        p_value: p-value of that test; if no threshold passed, the smallest of all.
    """

    most_doubt: float | None
    num_accepted: int
    num_wrong: int
    level: float
    p_value: float

    def accepts(self, confidence: NDArray) -> NDArray[np.bool_]:
        """Return which predictions are accepted, (n,), given their largest probabilities, (n,)."""
        if self.most_doubt is None:
            return np.zeros(len(confidence), dtype=bool)
        found: NDArray[np.bool_] = 1 - np.asarray(confidence, dtype=np.float64) <= self.most_doubt
        return found


def fit_acceptance(
    confidence: NDArray, is_right: NDArray, risk: float, certainty: float, *, groups: RowGroups | None = None
) -> AcceptanceRule:
    """Return the most lenient threshold whose risk is shown to be at most `risk`.

    The risk is the share of wrong predictions among the accepted ones. The bound holds with probability `certainty`
    over calibration sets. If the true risk of a threshold exceeds `risk`, at most e of its m accepted predictions are
    wrong with probability at most P(Binomial(m, risk) <= e). Each threshold is tested at its share of 1 - certainty
    plus the level it inherits; if the test passes, it hands this level on to the next threshold.

    Args:
        confidence: (n,), largest probabilities.
        is_right: (n,), whether the prediction is correct.
        groups: groups of dependent examples, or None; the risk is then that of a random row of a new group.
    """
    doubt, thresholds = 1 - np.asarray(confidence, dtype=np.float64), doubts()
    tested = _test_in_sequence(doubt, ~np.asarray(is_right, dtype=bool), thresholds, risk, certainty, groups=groups)
    return AcceptanceRule(
        float(thresholds[tested.place]) if tested.is_passed else None,
        tested.num_accepted,
        tested.num_wrong,
        tested.level,
        tested.p_value,
    )


class _Tested(NamedTuple):
    """The most lenient threshold that passed its test, or the one with the smallest p-value if none did."""

    place: int
    is_passed: bool
    num_accepted: int
    num_wrong: int
    level: float
    p_value: float


def _test_in_sequence(
    scores: NDArray,
    is_wrong: NDArray,
    thresholds: NDArray[np.float64],
    risk: float,
    certainty: float,
    *,
    starts: int = _STARTS,
    groups: RowGroups | None = None,
) -> _Tested:
    """Test from strict to lenient whether at most `risk` of the scores up to each threshold are wrong; see fit_acceptance.

    Args:
        scores, is_wrong: (n,), of each example.
        thresholds: (T,), ascending.
        starts: distance of the thresholds that get a share of the level.
        groups: groups of dependent examples, or None.
    """
    accepted, errors = (np.searchsorted(np.sort(side), thresholds, side="right") for side in (scores, scores[is_wrong]))
    if groups is None:
        p_values = np.where(accepted > 0, special.bdtr(errors, np.maximum(accepted, 1), risk), 1.0)
    else:
        # The risk is at most r exactly if accepted (wrong - r) + r, in [0, 1], expects at most r for a random row.
        terms = [groups.means((scores <= one) * (is_wrong - risk)).mean() + risk for one in thresholds]
        p_values = np.where(accepted > 0, bounded_mean_p_values(np.array(terms), len(groups), risk), 1.0)
    share = (1 - certainty) / len(thresholds[::starts])
    level, best = 0.0, None
    for place, p_value in enumerate(p_values):
        level += share if place % starts == 0 else 0.0
        if 0 < level >= p_value:
            best = (place, level)
        else:
            level = 0.0
    place, level = best if best is not None else (int(np.argmin(p_values)), share)
    return _Tested(place, best is not None, int(accepted[place]), int(errors[place]), level, float(p_values[place]))


def min_accepted(risk: float, certainty: float, *, num_shares: int = _NUM_SHARES) -> int:
    """Return the smallest number of accepted predictions, all of them right, that can show the risk."""
    return math.ceil(math.log((1 - certainty) / num_shares) / math.log1p(-risk))


@dataclass(frozen=True)
class ClassRule:
    """Flag the examples whose probability of one class is at least a threshold.

    Args:
        of_class: index of the class.
        threshold: None flags nothing, for lack of evidence.
        num_flagged, num_right, num_positive: on the calibration examples, those flagged (if no threshold passed, by
            the one with the smallest p-value), those of them that are of the class, and all of the class.
    """

    of_class: int
    threshold: float | None
    num_flagged: int
    num_right: int
    num_positive: int

    def flags(self, probs: NDArray) -> NDArray[np.bool_]:
        """Return which examples are flagged, (n,), given probs (n, K)."""
        if self.threshold is None:
            return np.zeros(len(probs), dtype=bool)
        found: NDArray[np.bool_] = np.asarray(probs[:, self.of_class], dtype=np.float64) >= self.threshold
        return found


@cache
def class_thresholds() -> NDArray[np.float64]:
    """Return thresholds on the probability of a class, from strict to lenient: equal steps of its logit, 8 to -8."""
    found: NDArray[np.float64] = special.expit(np.linspace(8, -8, 161))
    return found


def fit_precision(
    probability: NDArray,
    is_positive: NDArray,
    precision: float,
    certainty: float,
    *,
    of_class: int,
    groups: RowGroups | None = None,
) -> ClassRule:
    """Return the most lenient threshold whose flagged examples are shown to be of the class at least this often.

    The tests are those of fit_acceptance, with a risk of 1 - precision and the thresholds of class_thresholds.

    Args:
        probability: (n,), of the class.
        is_positive: (n,), whether the example is of the class.
        groups: groups of dependent examples, or None.
    """
    values, is_positive = np.asarray(probability, dtype=np.float64), np.asarray(is_positive, dtype=bool)
    thresholds = class_thresholds()
    tested = _test_in_sequence(
        -values, ~is_positive, -thresholds, 1 - precision, certainty, starts=_CLASS_STARTS, groups=groups
    )
    threshold = float(thresholds[tested.place]) if tested.is_passed else None
    right = tested.num_accepted - tested.num_wrong
    return ClassRule(of_class, threshold, tested.num_accepted, right, int(is_positive.sum()))


def fit_recall(
    probability: NDArray,
    is_positive: NDArray,
    recall: float,
    certainty: float,
    *,
    of_class: int,
    groups: RowGroups | None = None,
) -> ClassRule:
    """Return the largest threshold that flags at least this share of the class, for `certainty` of calibration sets.

    The threshold is an order statistic of the class's own examples, so the bound is exact (see excluding_rank).
    Arguments are as in fit_precision. With groups, the bound is that of fit_group_threshold for the groups with the class.

    Raises:
        ValueError: there are too few examples of the class, or groups with it (see min_scores_for_coverage).
    """
    values, is_positive = np.asarray(probability, dtype=np.float64), np.asarray(is_positive, dtype=bool)
    own = np.sort(values[is_positive])
    if groups is not None:
        rows = np.flatnonzero(is_positive)
        found = fit_group_threshold(-values[rows], groups.of_rows(rows), recall, certainty)
    else:
        rank = excluding_rank(len(own), float(1 - exact_level(recall)), certainty)
        found = None if rank is None else -float(own[rank - 1])
    if found is None:
        raise ValueError(f"{len(own)} examples are too few for a recall of {recall}")
    threshold = -found
    flagged = values >= threshold
    return ClassRule(of_class, threshold, int(flagged.sum()), int((flagged & is_positive).sum()), len(own))


@dataclass(frozen=True)
class CostRule:
    """Decide what has the least expected cost under the probabilities, the first among ties.

    Args:
        costs: (K, A), of each decision for each true class.
        names: of the A decisions.
    """

    costs: NDArray[np.float64]
    names: tuple[str, ...]

    def decide(self, probs: NDArray) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the decision (N,) of each example and its expected cost (N,); probs (N, K) may be memory-mapped."""
        decided, expected = np.empty(len(probs), dtype=np.int64), np.empty(len(probs))
        for rows in row_blocks(*probs.shape):
            costs = np.asarray(probs[rows], dtype=np.float64) @ self.costs
            decided[rows], expected[rows] = costs.argmin(axis=1), costs.min(axis=1)
        return decided, expected

    def of_classes(self, classes: Sequence[str]) -> NDArray[np.int64] | None:
        """Return the decision (K,) that has the name of each class; None where a class has none."""
        return np.array([self.names.index(one) for one in classes]) if {*classes} <= {*self.names} else None


def mean_interval(values: NDArray, bounds: tuple[float, float], confidence: float) -> tuple[float, float]:
    """Return an interval that contains the mean of independent values (n,) within bounds, whatever their distribution.

    It is the hedged betting interval of Waudby-Smith and Ramdas (2024, arXiv:2010.09686, equation 26): a mean is left
    out once bets against it have multiplied their stake by 1 / (1 - confidence). The order of the values is shuffled
    with a fixed seed.
    """
    low, high = bounds
    if low == high or len(values) == 0:
        return low, high
    unit = (np.random.default_rng(0).permutation(np.asarray(values, dtype=np.float64)) - low) / (high - low)
    mean = float(unit.mean())  # is always inside, although bets against it may have won
    least, most = min(mean, _least_mean(unit, confidence)), max(mean, 1 - _least_mean(1 - unit, confidence))
    return low + (high - low) * least, low + (high - low) * most


_MOST_STAKE = 0.75  # of the capital; bets beyond it risk losing everything


def _least_mean(unit: NDArray[np.float64], confidence: float) -> float:
    """Return the lower end of mean_interval for values (n,) in [0, 1], by bisection: the capital falls with the mean."""
    size, needed = len(unit), math.log(2 / (1 - confidence))
    before = np.arange(1, size + 1)
    means_before = (0.5 + np.cumsum(unit)) / (before + 1)
    variance = (0.25 + np.cumsum((unit - means_before) ** 2)) / (before + 1)
    stakes = np.sqrt(2 * needed / (size * np.concatenate([[0.25], variance[:-1]])))

    def is_excluded(mean: float) -> bool:
        growth = np.log1p(np.minimum(stakes, _MOST_STAKE / mean) * (unit - mean))
        return bool(growth.sum() >= needed)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_excluded(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class OutlierRule:
    """Flag examples whose score is below the threshold; scores are higher for in-distribution examples."""

    threshold: float

    def is_outlier(self, scores: NDArray) -> NDArray[np.bool_]:
        """Return which of the scores (n,) are outliers, (n,)."""
        found: NDArray[np.bool_] = np.asarray(scores, dtype=np.float64) < self.threshold
        return found


def fit_outliers(
    scores: NDArray, false_alarm: float, confidence: float | None = None, *, groups: RowGroups | None = None
) -> OutlierRule:
    """Fit the rule to in-distribution calibration scores (n,).

    An example is an outlier if its conformal p-value, (1 + number of calibration scores at most its own) / (n + 1), is
    at most the rate.

    Args:
        confidence: share of calibration sets that must each keep the false-alarm rate; None: on average over them.
        groups: groups of dependent examples, or None; see fit_group_threshold.

    Raises:
        ValueError: there are too few examples or groups.
    """
    if groups is not None:
        coverage = float(1 - exact_level(false_alarm))
        threshold = fit_group_threshold(-np.asarray(scores, dtype=np.float64), groups, coverage, confidence)
        if threshold is None:
            raise ValueError(f"{len(groups)} groups are too few for a false-alarm rate of {false_alarm}")
        return OutlierRule(-threshold)
    rank = excluding_rank(len(scores), false_alarm, confidence)
    if rank is None:
        raise ValueError(f"{len(scores)} examples are too few for a false-alarm rate of {false_alarm}")
    return OutlierRule(float(np.partition(np.asarray(scores, dtype=np.float64), rank - 1)[rank - 1]))


SMALLEST_P = 1e-9  # smaller p-values, computed as 1 - sum, would be rounding errors
_BAND = 1 << 28  # limit on the number of states (seconds of work); beyond it the bound in distance_p_value decides


@dataclass(frozen=True)
class ShiftRule:
    """A shift alarm.

    Args:
        scores: (n,), calibration scores in ascending order.
        level: largest probability of an alarm without shift, over calibration sets and batches.
    """

    scores: NDArray[np.float64]
    level: float

    def p_value(self, batch: NDArray) -> float | None:
        """Return the p-value of a batch's scores (m,); None if the batch is empty."""
        if len(batch) == 0:
            return None
        return distance_p_value(kolmogorov_smirnov_distance(self.scores, batch), len(self.scores), len(batch))


def kolmogorov_smirnov_distance(first: NDArray, second: NDArray) -> int:
    """Return the Kolmogorov-Smirnov distance of samples (n,) and (m,) times n m, an integer."""
    one, other = (np.sort(np.asarray(side, dtype=np.float64)) for side in (first, second))
    places = np.concatenate([one, other])
    below, others = (np.searchsorted(side, places, side="right").astype(np.int64) for side in (one, other))
    return int(np.abs(below * len(other) - others * len(one)).max())


def distance_p_value(gap: int, n: int, m: int) -> float:
    """Return the probability that samples of sizes n and m from one continuous distribution are at least this far apart.

    `gap` is the distance in units of 1 / (n m). The result is at least SMALLEST_P.
    """
    if gap == 0:
        return 1.0
    n, m = min(n, m), max(n, m)
    squared = (gap / (n * m)) ** 2 * n * m / (n + m)
    # Wei and Dudley (2012, arXiv:1107.5356) prove this bound for equal sizes; it holds for all unequal sizes ever
    # computed. It decides only if the exact value is far below SMALLEST_P or would take too long.
    bound = math.e * math.exp(-2 * squared)
    if bound < SMALLEST_P * 1e-3 or n * (2 * gap // n + 1) > _BAND:
        return max(SMALLEST_P, min(1.0, bound))
    return max(SMALLEST_P, min(1.0, 1 - _stays_within(gap, n, m)))


def _stays_within(gap: int, n: int, m: int) -> float:
    """Return the probability that a uniform lattice path of n and m steps keeps |i m - j n| < gap after i and j steps."""
    from scipy.signal import lfilter

    chance = n / (n + m)  # probability of a step of the n; any value is correct, this one keeps the numbers near one
    start = 0
    row: NDArray[np.floating] = np.ones(1)
    for i in range(n + 1):
        first, last = max(0, (i * m - gap) // n + 1), min(m, -((-i * m - gap) // n) - 1)
        if last < first:
            return 0.0
        if i == 0:
            row = (1 - chance) ** np.arange(last + 1)
        else:
            arriving = np.zeros(last - first + 1)
            kept = row[first - start :]
            arriving[: len(kept)] = chance * kept
            row = lfilter([1.0], [1.0, -(1 - chance)], arriving)
        start = first
    log_ending = (
        special.gammaln(n + m + 1) - special.gammaln(n + 1) - special.gammaln(m + 1)
        + n * math.log(chance) + m * math.log1p(-chance)
    )  # fmt: skip
    return float(row[m - start] / math.exp(log_ending))


Rule = SetRule | AcceptanceRule | ClassRule | CostRule | OutlierRule | ShiftRule
_SCORE = ("scheme", "seed", "penalty", "free_ranks")
_TESTED = ("num_accepted", "num_wrong", "level", "p_value")
_COUNTED = ("of_class", "num_flagged", "num_right", "num_positive")


def to_arrays(rule: Rule) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
    """Return the arrays of a rule and its other values."""
    if isinstance(rule, SetRule):
        known = {name: getattr(rule.score, name) for name in _SCORE}
        return {"thresholds": rule.thresholds}, {**known, "is_filled": rule.is_filled}
    if isinstance(rule, AcceptanceRule):
        found = [] if rule.most_doubt is None else [rule.most_doubt]
        return {"most_doubt": np.array(found, dtype=np.float64)}, {name: getattr(rule, name) for name in _TESTED}
    if isinstance(rule, ClassRule):
        found = [] if rule.threshold is None else [rule.threshold]
        return {"threshold": np.array(found, dtype=np.float64)}, {name: getattr(rule, name) for name in _COUNTED}
    if isinstance(rule, CostRule):
        return {"costs": rule.costs}, {"names": list(rule.names)}
    if isinstance(rule, OutlierRule):
        return {"threshold": np.array([rule.threshold], dtype=np.float64)}, {}
    return {"scores": rule.scores}, {"level": rule.level}


def from_arrays(kind: str, arrays: Mapping[str, NDArray[np.float64]], known: Mapping[str, Any], size: int) -> Rule:
    """Rebuild a rule of this kind for `size` classes.

    Raises:
        KeyError, TypeError, ValueError: the arrays and values do not describe such a rule.
    """
    if kind == SETS:
        thresholds = arrays["thresholds"]
        if thresholds.shape not in ((1,), (size,)):
            raise ValueError(f"thresholds: expected 1 or {size} values; got shape {thresholds.shape}")
        return SetRule(SetScore(**{name: known[name] for name in _SCORE}), thresholds, bool(known["is_filled"]))
    if kind == RISK:
        found = [float(value) for value in arrays["most_doubt"]]
        if len(found) > 1:
            raise ValueError(f"most_doubt: expected at most one number; got {len(found)}")
        return AcceptanceRule(found[0] if found else None, **{name: known[name] for name in _TESTED})
    if kind in (PRECISION, RECALL):
        found = [float(value) for value in arrays["threshold"]]
        counts = {name: int(known[name]) for name in _COUNTED}
        if len(found) > 1 or not 0 <= counts["of_class"] < size:
            raise ValueError(f"expected at most one threshold, of a class below {size}")
        return ClassRule(threshold=found[0] if found else None, **counts)
    if kind == COSTS:
        names = tuple(str(name) for name in known["names"])
        if arrays["costs"].shape != (size, len(names)) or not names:
            raise ValueError(f"costs: expected shape ({size}, {len(names)}); got {arrays['costs'].shape}")
        return CostRule(arrays["costs"], names)
    if kind == OOD:
        return OutlierRule(float(arrays["threshold"].item()))
    if kind != SHIFT:
        raise ValueError(f"expected one of {', '.join(KINDS)}; got {kind!r}")
    scores = arrays["scores"]
    if scores.ndim != 1 or len(scores) == 0 or np.any(np.diff(scores) < 0):
        raise ValueError("scores: expected numbers in ascending order")
    return ShiftRule(scores, float(known["level"]))


_SHARE = (0.0, 1.0)


def set_scores(
    rule: SetRule, probs: NDArray, labels: NDArray | None, uniform: NDArray | None, choices: dict[str, Any]
) -> list[ScoreGroup]:
    """Return coverage, worst-class coverage, mean set size, and the shares of empty and of singleton sets."""
    size, covered = np.empty(len(probs), dtype=np.int64), np.zeros(len(probs), dtype=bool)
    for rows, sets in rule.set_blocks(probs, uniform):
        size[rows] = sets.sum(axis=1)
        if labels is not None:
            covered[rows] = np.take_along_axis(sets, np.asarray(labels[rows], dtype=np.int64)[:, None], axis=1)[:, 0]
    coverage = ScoreForm("set_coverage", choices, None, bounds=_SHARE)
    worst = ScoreForm("worst_class_coverage", choices, True, bounds=_SHARE)
    sizes = [
        ScoreForm("set_size", choices, False, bounds=(0.0, float(probs.shape[1]))),
        ScoreForm("empty_sets", choices, None, bounds=_SHARE),
        ScoreForm("singleton_sets", choices, True, bounds=_SHARE),
    ]
    found = [means(sizes, [size, size == 0, size == 1])]
    if labels is None:
        return [ScoreGroup([coverage, worst], None, NO_LABELS), *found]
    return [means([coverage], [covered]), _worst_class(worst, covered, labels), *found]


def _worst_class(form: ScoreForm, covered: NDArray, labels: NDArray) -> ScoreGroup:
    """Return the lowest coverage over the classes that occur."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(np.asarray(labels)[order], prepend=-1))
    is_covered = covered[order].astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        ordered = weights[:, order].astype(np.float64)
        counts = np.add.reduceat(ordered, starts, axis=1)
        shares = np.add.reduceat(ordered * is_covered, starts, axis=1) / np.maximum(counts, 1)
        found: Floats = np.where(counts > 0, shares, np.inf).min(axis=1, keepdims=True)
        return found

    return ScoreGroup([form], statistic, cost=3.0)


def acceptance_scores(accepted: NDArray, is_right: NDArray | None, choices: dict[str, Any]) -> list[ScoreGroup]:
    """Return the share of accepted predictions (N,) and the share of wrong predictions among them."""
    share = means([ScoreForm("acceptance", choices, True, bounds=_SHARE)], [accepted])
    form = ScoreForm("selective_risk", choices, False, bounds=_SHARE, when_nan="no predictions are accepted")
    if is_right is None:
        return [share, ScoreGroup([form], None, NO_LABELS)]
    columns = np.stack([accepted & ~np.asarray(is_right, dtype=bool), accepted], axis=1).astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        wrong, count = (weights.astype(np.float64) @ columns).T
        return np.where(count > 0, wrong / np.maximum(count, 1), np.nan)[:, None]

    return [share, ScoreGroup([form], statistic)]


def class_scores(flagged: NDArray, is_positive: NDArray | None, choices: dict[str, Any]) -> list[ScoreGroup]:
    """Return the share of flagged examples (N,), the share of the class among them, and the share of the class flagged."""
    share = means([ScoreForm("flagged", choices, None, bounds=_SHARE)], [flagged])
    forms = [
        ScoreForm("flag_precision", choices, True, bounds=_SHARE, when_nan="no examples are flagged"),
        ScoreForm("flag_recall", choices, True, bounds=_SHARE, when_nan="no examples of the class"),
    ]
    if is_positive is None:
        return [share, ScoreGroup(forms, None, NO_LABELS)]
    columns = np.stack([flagged & is_positive, flagged, is_positive], axis=1).astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        totals = weights.astype(np.float64) @ columns
        found: Floats = np.where(totals[:, 1:] > 0, totals[:, :1] / np.maximum(totals[:, 1:], 1), np.nan)
        return found

    return [share, ScoreGroup(forms, statistic)]


def cost_scores(
    rule: CostRule, probs: NDArray, labels: NDArray | None, classes: Sequence[str], choices: dict[str, Any]
) -> list[ScoreGroup]:
    """Return the mean cost of the decisions, the mean that the probabilities expect, and the mean of deciding for the predicted class."""
    bounds = (float(rule.costs.min()), float(rule.costs.max()))
    names = ("decision_cost", "expected_cost", "argmax_cost")
    real, expected, plain = (ScoreForm(name, choices, False, bounds=bounds) for name in names)
    decided, costs = rule.decide(probs)
    found = [means([expected], [costs])]
    if labels is None:
        return [ScoreGroup([real, plain], None, NO_LABELS), *found]
    found = [means([real], [rule.costs[labels, decided]]), *found]
    of_classes = rule.of_classes(classes)
    if of_classes is None:
        return [*found, ScoreGroup([plain], None, "not every class has a decision of its name")]
    return [*found, means([plain], [rule.costs[labels, of_classes[np.argmax(probs, axis=1)]]])]


def alarm_scores(is_outlier: NDArray, choices: dict[str, Any], *, is_ood: bool) -> list[ScoreGroup]:
    """Return the share of examples (N,) flagged as outliers: detection rate on an OOD split, false-alarm rate otherwise."""
    name = "detection_rate" if is_ood else "false_alarm_rate"
    return [means([ScoreForm(name, choices, is_ood, bounds=_SHARE)], [is_outlier])]


SETS, RISK, PRECISION, RECALL, COSTS, OOD, SHIFT = KINDS = (
    "sets",
    "risk",
    "precision",
    "recall",
    "costs",
    "ood",
    "shift",
)  # kinds of rules, also the default names of rules
LAC, APS, RAPS = SCHEMES = ("lac", "aps", "raps")  # schemes of prediction sets
