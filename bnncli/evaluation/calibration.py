"""Calibration errors: binned by confidence, class by class and label by label, with intervals and the floor of a calibrated model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.statistics import (
    NO_LABELS,
    ExampleStatistics,
    Floats,
    ScoreForm,
    ScoreGroup,
    row_blocks,
    total_weights,
)
from bnncli.lazy import sparse, special

NUM_DRAWS = 1000  # draws of a calibrated model's labels
_FEWEST_DRAWS = 200
_MOST_VALUES = 1 << 16  # number of draws times number of bins; many bins get fewer draws
FEWEST_EVENTS = 5  # expected events in a bin, below which its noise is unreliable
_STEPS = 14  # bisection steps: the ends are exact to a few thousandths of the width
_DOUBLINGS = 40


@dataclass(frozen=True)
class Gaps:
    """Stated minus observed frequencies of M bins, as sums over the examples of each bin.

    Args:
        observed: (M,).
        calibrated: (R, M), draws of a calibrated model.
        noise: (R, M), draws of the sampling noise in the gaps; mean 0.
        is_rare: (M,), bins of so few events that the noise at other frequencies may be much smaller.
    """

    observed: Floats
    calibrated: Floats
    noise: Floats
    is_rare: NDArray[np.bool_]


@dataclass(frozen=True)
class CalibrationError:
    """A calibration error as a function of gaps.

    Args:
        estimate: maps gaps (R, M) of samples to errors (R,), which debiasing may make negative.
        size: maps gaps (M,) of a population to its error.
        is_inverted: whether the interval inverts tests; False for the largest gap, whose size constrains no other gap.
    """

    estimate: Callable[[Floats], Floats]
    size: Callable[[Floats], float]
    is_inverted: bool = True


def judge_error(gaps: Gaps, form: CalibrationError, *, level: float) -> dict[str, Any]:
    """Return `floor`, `p_calibrated` and `interval` of a calibration error.

    Args:
        level: level of the interval, between 0 and 1.
    """
    estimate = float(form.estimate(gaps.observed[None])[0])
    found = noise_floor(gaps, form)
    tail = (1 - level) / 2
    low = 0.0 if found["p_calibrated"] >= tail else _low(gaps, form, estimate, tail)
    high = max(low, _high(gaps, form, estimate, tail))
    ends = {"low": min(low, 1.0), "high": min(high, 1.0), "level": level, "method": "inverted"}
    return {**found, "interval": {**ends, "replicates": len(gaps.calibrated)}}


def noise_floor(gaps: Gaps, form: CalibrationError) -> dict[str, float]:
    """Return `floor`, a calibrated model's mean error, and `p_calibrated`, the p-value of the observed error."""
    estimate = float(form.estimate(gaps.observed[None])[0])
    drawn = form.estimate(gaps.calibrated)
    reached = int(np.sum(drawn >= estimate - 1e-12))  # tolerate rounding of reordered sums
    return {"floor": float(np.maximum(drawn, 0.0).mean()), "p_calibrated": (1 + reached) / (1 + len(drawn))}


def draw_gaps(
    size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, generator: np.random.Generator
) -> Gaps:
    """Return the gaps of bins whose events happen independently.

    Args:
        size: (M,), possible events per bin, at least 1.
        stated, squares: (M,), sums of their stated probabilities and of the squares of these.
        observed: (M,), number of events that happened.
    """
    num_draws = min(NUM_DRAWS, max(_FEWEST_DRAWS, _MOST_VALUES // max(1, len(size))))
    calibrated = stated - _draw_counts(size, stated, squares, num_draws, generator)
    found = stated - observed
    tilted = np.clip(stated - shrink_gaps(found, calibrated.std(axis=0)), 0.0, size)
    # Keep the relative spread of the stated probabilities within a bin, where that is possible.
    ratio = np.divide(tilted, stated, out=np.ones_like(tilted), where=stated > 0)
    apart = np.clip(squares * ratio**2, tilted**2 / size, tilted)
    noise = tilted - _draw_counts(size, tilted, apart, num_draws, generator)
    return Gaps(found, calibrated, noise, stated < FEWEST_EVENTS)


def largest_gap(size: NDArray, stated: NDArray, squares: NDArray, observed: NDArray, *, level: float) -> dict[str, Any]:
    """Return a simultaneous `interval` for the largest gap over the non-empty bins; the least certain bin makes it wide.

    It combines the interval of each frequency (Clopper and Pearson 1934) with the normal interval of each mean
    probability by Bonferroni, over twice as many intervals as bins. It does not cover gaps in bins that the sample
    leaves empty. Arguments as in drawn_gaps.
    """
    tail = (1 - level) / 2 / (2 * len(size))
    lowest = np.where(observed > 0, special.betaincinv(np.maximum(observed, 1), size - observed + 1, tail), 0.0)
    highest = np.where(observed < size, special.betaincinv(observed + 1, np.maximum(size - observed, 1), 1 - tail), 1.0)
    mean = stated / size
    margin = special.ndtri(1 - tail) * np.sqrt(np.maximum(squares / size - mean**2, 0.0) / size)
    low = np.maximum(np.maximum(lowest - (mean + margin), (mean - margin) - highest), 0.0).max()
    high = np.maximum(mean + margin - lowest, highest - (mean - margin)).max()
    return {
        "low": float(low),
        "high": min(float(high), 1.0),
        "level": level,
        "method": "clopper-pearson",
        "replicates": None,
    }


def shrink_gaps(gaps: NDArray, spread: NDArray) -> Floats:
    """Move gaps (M,) towards 0 by `spread` (M,), but not past it."""
    return np.sign(gaps) * np.maximum(np.abs(gaps) - spread, 0.0)


def _draw_counts(
    size: NDArray, sums: NDArray, squares: NDArray, num_draws: int, generator: np.random.Generator
) -> Floats:
    """Draw how many of `size` independent events happen, (R, M), given the sums of their probabilities and of the squares.

    Each draw is a binomial that matches mean and variance, of the rarer of event and complement (Ehm 1991, Statistics
    and Probability Letters 11, 7; here the number of trials is matched as well).
    """
    is_common = sums > size - sums
    mean = np.where(is_common, size - sums, sums)
    square = np.where(is_common, size - 2 * sums + squares, squares)
    trials = np.ones(len(mean), dtype=np.int64)
    np.ceil(np.divide(mean**2, square, out=np.ones(len(mean)), where=square > 0) - 1e-9, out=trials, casting="unsafe")
    trials = np.maximum(trials, 1)
    drawn = generator.binomial(trials, np.clip(mean / trials, 0.0, 1.0), size=(num_draws, len(mean)))
    return np.where(is_common, size - drawn, drawn)


def _low(gaps: Gaps, form: CalibrationError, estimate: float, tail: float) -> float:
    """Return the smallest size of shrunken gaps at which more than a share `tail` of samples reach the estimate.

    Bins without a gap get the noise of a calibrated model, so the interval excludes 0 exactly if the test rejects.
    """
    spread = gaps.noise.std(axis=0)
    spread = np.where(spread > 0, spread, np.abs(gaps.observed))

    def at(amount: float) -> Floats:
        return shrink_gaps(gaps.observed, amount * spread)

    def is_rejected(amount: float) -> bool:
        population = at(amount)
        samples = np.where(population == 0, gaps.calibrated, population + gaps.noise)
        return float(np.mean(form.estimate(samples) >= estimate)) <= tail

    return form.size(at(_last_not(is_rejected)))


def _high(gaps: Gaps, form: CalibrationError, estimate: float, tail: float) -> float:
    """Return the largest size of gaps at which more than a share `tail` of samples stay at or below the estimate."""
    sign = np.where(gaps.observed < 0, -1.0, 1.0)
    found = [0.0]
    for direction in (gaps.observed, sign * gaps.noise.std(axis=0)):
        if not direction.any():
            continue

        def is_rejected(amount: float, direction: NDArray = direction) -> bool:
            return float(np.mean(form.estimate(amount * direction + gaps.noise) <= estimate)) <= tail

        found.append(form.size(_last_not(is_rejected) * direction))
    if not gaps.is_rare.any():
        return max(found)
    from_rare = form.estimate(np.where(gaps.is_rare, gaps.noise, 0.0)).mean()
    far = form.estimate(
        sign * np.abs(gaps.noise).max() + gaps.noise
    )  # far from 0, noise adds to an error as often as it subtracts
    return max(*found, min(max(found) + float(from_rare), estimate + float(special.ndtri(1 - tail) * far.std())))


def _last_not(is_true: Callable[[float], bool]) -> float:
    """Return, by bisection from 0, the largest amount up to which a statement is false."""
    low, high = 0.0, 1.0
    for _ in range(_DOUBLINGS):
        if is_true(high):
            break
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return low


NUM_BINS = 15  # the usual choice since Guo et al. (2017)
PUBLISHED_BINS = 100
_AT_ONCE = 1 << 14  # examples per matrix product, to avoid a second copy of all weights


@dataclass(frozen=True)
class Reliability:
    """Contents of confidence bins; bin b is (edges[b], edges[b + 1]], the first includes its lower edge.

    Args:
        edges: (B + 1,) from 0 to 1.
        count: (B,) examples per bin; they sum to N.
        confidence: (B,) mean confidence; NaN in an empty bin.
        accuracy: (B,) fraction of examples that are right; NaN in an empty bin.
    """

    edges: Floats
    count: NDArray[np.int64]
    confidence: Floats
    accuracy: Floats


class Bins(NamedTuple):
    """Sums (M,) over the examples of non-empty bins: counts, stated probabilities, their squares, events."""

    size: Floats
    stated: Floats
    squares: Floats
    observed: Floats


def reliability(examples: ExampleStatistics, *, num_bins: int = NUM_BINS, strategy: str = "equal-width") -> Reliability:
    """Return counts, confidence and accuracy of labelled examples in bins of the confidence.

    Args:
        num_bins: B, at least 1.
        strategy: `equal-width` or `equal-mass`. Bins of equal mass hold N / B examples each, up to ties and rounding;
            equal confidences share a bin.
    """
    edges = _edges(examples.confidence, num_bins, strategy)
    index = _index(examples.confidence, edges)
    count = np.bincount(index, minlength=num_bins)
    size = np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        count=count,
        confidence=np.bincount(index, weights=examples.confidence, minlength=num_bins) / size,
        accuracy=np.bincount(index, weights=examples.is_right, minlength=num_bins) / size,
    )


def calibration_scores(examples: ExampleStatistics, *, num_bins: int = NUM_BINS) -> list[ScoreGroup]:
    """Return ECE and MCE in bins of equal width and of equal mass, the debiased l2 error, and the published ECE."""
    if examples.is_right is None:
        nothing = np.zeros(0)
        groups = [_plain(nothing, nothing, num_bins, s) for s in ("equal-width", "equal-mass")]
        groups.append(_compute_published_ece(nothing, nothing))
        return [ScoreGroup(group.members, None, NO_LABELS) for group in groups]
    confidence, is_right = examples.confidence, examples.is_right.astype(np.float64)
    groups = [_plain(confidence, is_right, num_bins, strategy) for strategy in ("equal-width", "equal-mass")]
    return [*groups, _compute_published_ece(confidence, is_right)]


def bin_sums(weights: NDArray, index: NDArray, values: NDArray, *, num_bins: int) -> Floats:
    """Return weighted sums (b, num_bins, m) of values (N, m) over the examples of each bin; index (N,), weights (b, N)."""
    num_values = values.shape[1]
    sums = np.zeros((num_bins * num_values, len(weights)))
    for start in range(0, len(index), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        columns = index[rows, None] * num_values + np.arange(num_values)
        starts = np.arange(0, columns.size + 1, num_values)
        shape = len(columns), len(sums)
        spread = sparse.csr_array((values[rows].ravel(), columns.ravel(), starts), shape=shape)
        sums += spread.T @ np.ascontiguousarray(weights[:, rows].T, dtype=np.float64)
    return np.ascontiguousarray(sums.T).reshape(len(weights), num_bins, -1)


def _plain(confidence: NDArray, is_right: NDArray, num_bins: int, strategy: str) -> ScoreGroup:
    """ECE and MCE in bins of one strategy; for equal-mass bins also the debiased error, as its authors bin."""
    choices = {"bins": num_bins, "strategy": strategy}
    members = [_score("ece", {**choices, "norm": "l1"}), _score("mce", choices)]
    if strategy == "equal-mass":
        debiased = {**choices, "norm": "l2", "estimator": "debiased"}
        members.append(_score("ece", debiased, when_nan="no bin holds two examples, so the noise cannot be estimated"))
    index = _index(confidence, _edges(confidence, num_bins, strategy))
    values = np.stack([np.ones(len(confidence)), confidence - is_right, is_right], axis=1)[:, : len(members)]

    def statistic(weights: NDArray) -> Floats:
        sums = bin_sums(weights, index, values, num_bins=num_bins)
        count, gap = sums[..., 0], np.abs(sums[..., 1])
        mean_gap = gap / np.maximum(count, 1)
        found = [gap.sum(axis=1) / total_weights(weights), mean_gap.max(axis=1)]
        if strategy == "equal-mass":
            found.append(_estimate_debiased_root(count, mean_gap, sums[..., 2] / np.maximum(count, 1)))
        return np.stack(found, axis=1)

    def judge(generator: np.random.Generator, level: float | None, groups: RowGroups | None) -> list[dict[str, Any]]:
        if groups is not None:
            found = _judge_groups(confidence, is_right, index, groups, generator, level, num_bins=num_bins)
            return [found, *([_not_of_groups(level)] * (len(members) - 1))]
        bins = bin_events(confidence, is_right, index, num_bins=num_bins)
        return judge_errors(
            bins, [total_form(len(index)), _largest_form(bins), _debiased_form(bins)][: len(members)], generator, level
        )

    return ScoreGroup(members, statistic, against_chance=judge)


_NOT_OF_GROUPS = "not computed for rows in groups, which are dependent"


def _not_of_groups(level: float | None) -> dict[str, Any]:
    """Return what the row of a calibration error has instead of floor, test and interval if rows are in groups."""
    none = {"floor": None, "floor_undefined": _NOT_OF_GROUPS}
    return none if level is None else {**none, "interval": None}


def _judge_groups(
    values: NDArray,
    events: NDArray,
    index: NDArray,
    groups: RowGroups,
    generator: np.random.Generator,
    level: float | None,
    *,
    num_bins: int,
) -> dict[str, Any]:
    """Return floor, test and, given a level, interval of the ECE of stated probabilities (N,), with the noise of whole groups."""
    place = groups.index * num_bins + index
    shape = len(groups), num_bins
    columns = (None, values, events, values * (1 - values))
    sums = [np.bincount(place, column, len(groups) * num_bins).reshape(shape).astype(np.float64) for column in columns]
    return _judge_sums(GapSums(*sums), generator, level, size=float(len(index)))


def bin_events(values: NDArray, events: NDArray, index: NDArray, *, num_bins: int) -> Bins:
    """Return the non-empty bins of stated probabilities (N,) and of whether the stated event happened (N,)."""
    count = np.bincount(index, minlength=num_bins)
    is_used = count > 0
    columns = (values, values**2, events)
    stated, squares, observed = (np.bincount(index, column, num_bins)[is_used].astype(np.float64) for column in columns)
    return Bins(count[is_used].astype(np.float64), stated, squares, observed)


def judge_errors(
    bins: Bins, forms: list[CalibrationError], generator: np.random.Generator, level: float | None
) -> list[dict[str, Any]]:
    """Return floor, test and, given a level, interval of the errors of these forms: ECE, MCE and the debiased error."""
    gaps = draw_gaps(*bins, generator=generator)
    if level is None:
        return [noise_floor(gaps, form) for form in forms]
    return [
        judge_error(gaps, form, level=level)
        if form.is_inverted
        else {**noise_floor(gaps, form), "interval": largest_gap(*bins, level=level)}
        for form in forms
    ]


def total_form(size: float) -> CalibrationError:
    """Return the form that sums absolute gaps, as a share of `size` examples."""
    return CalibrationError(lambda x: np.abs(x).sum(axis=1) / size, lambda x: float(np.abs(x).sum() / size))


def _largest_form(bins: Bins) -> CalibrationError:
    size = bins.size
    return CalibrationError(
        lambda x: (np.abs(x) / size).max(axis=1), lambda x: float((np.abs(x) / size).max()), is_inverted=False
    )


def _debiased_form(bins: Bins) -> CalibrationError:
    """The signed root, which distinguishes samples below 0."""
    size, stated = bins.size, bins.stated / bins.size

    def estimate(gaps: Floats) -> Floats:
        square = _estimate_debiased_square(size, np.abs(gaps) / size, np.clip(stated - gaps / size, 0.0, 1.0))
        return np.sign(square) * np.sqrt(np.abs(square))

    return CalibrationError(estimate, lambda x: float(np.sqrt((x**2 / size).sum() / size.sum())))


def _estimate_debiased_root(count: Floats, gap: Floats, accuracy: Floats) -> Floats:
    """Return the root (b,) of the debiased mean squared gap, 0 if it is negative; NaN if no bin holds two examples."""
    error = np.sqrt(np.maximum(0.0, _estimate_debiased_square(count, gap, accuracy)))
    return np.where((count > 1).any(axis=-1), error, np.nan)


def _estimate_debiased_square(count: Floats, gap: Floats, accuracy: Floats) -> Floats:
    """Return the debiased mean squared gap (b,), negative if the noise exceeds the gaps.

    Kumar, Liang and Ma (2019), definition 5.2: E_b = gap^2 - accuracy (1 - accuracy) / (n - 1).
    """
    noise = accuracy * (1 - accuracy) / np.maximum(count - 1, 1)
    square = np.where(count > 1, gap**2 - noise, 0.0)
    return (count * square).sum(axis=-1) / count.sum(axis=-1)


def _compute_published_ece(confidence: NDArray, is_right: NDArray) -> ScoreGroup:
    """The ECE of the script published with the refinement paper (Kristiadi et al. 2022, arXiv 2205.10041).

    np.digitize numbers its 100 bins from 1, but the script reads bins 0 to 99: it skips every confidence from 0.99 on
    and redistributes the weight of these examples to the rest.
    """
    choices = {"bins": PUBLISHED_BINS, "strategy": "published", "norm": "l1"}
    edges = np.linspace(0, 1, PUBLISHED_BINS + 1)
    index = np.digitize(confidence, edges)
    is_used = index < PUBLISHED_BINS
    score = _score(
        "ece",
        choices,
        facts={"num_used": int(is_used.sum())},
        when_nan="every confidence is 0.99 or more; the published script skips these",
    )
    index = np.where(is_used, index, 0)
    values = np.stack([is_used, np.where(is_used, confidence - is_right, 0)], axis=1).astype(np.float64)

    def statistic(weights: NDArray) -> Floats:
        sums = bin_sums(weights, index, values, num_bins=PUBLISHED_BINS)
        used = sums[..., 0].sum(axis=1)
        gap = np.abs(sums[..., 1]).sum(axis=1)
        return np.divide(gap, used, out=np.full(len(gap), np.nan), where=used > 0)[:, None]

    def judge(generator: np.random.Generator, level: float | None, groups: RowGroups | None) -> list[dict[str, Any]]:
        if groups is not None:
            return [_not_of_groups(level)]
        bins = bin_events(confidence[is_used], is_right[is_used], index[is_used], num_bins=PUBLISHED_BINS)
        return judge_errors(bins, [total_form(int(is_used.sum()))], generator, level)

    return ScoreGroup([score], statistic, against_chance=judge)


def _score(name: str, choices: dict[str, object], **more: object) -> ScoreForm:
    make: Callable[..., ScoreForm] = ScoreForm
    return make(name, choices, False, bounds=(0.0, 1.0), **more)


def _edges(confidence: NDArray, num_bins: int, strategy: str) -> Floats:
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    if strategy == "equal-mass" and len(confidence):
        ranks = -(-len(confidence) * np.arange(1, num_bins) // num_bins)
        edges[1:-1] = np.sort(confidence)[np.maximum(ranks, 1) - 1]
    return edges


def _index(confidence: NDArray, edges: NDArray) -> NDArray[np.int64]:
    # Inner edges only: 0, 1 and 1 + rounding fall into the outer bins.
    return np.searchsorted(edges[1:-1], confidence, side="left")


def class_wise_scores(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> ScoreGroup:
    """Return the class-wise ECE in bins of equal width: whether each class is as frequent as its probability states.

    The mean over classes of the binned gap between the probability of the class and its frequency: static calibration
    error of Nixon et al. (2019), arXiv 1904.01685, section 3; classwise-ECE of Kull et al. (2019), arXiv 1910.12656.

    Args:
        probs: (N, C); may be memory-mapped: every computation of the statistic reads it in blocks of rows.
        labels: (N,) or None; (N, C) zeros and ones for multi-label predictions, which also get an error per label.
    """
    choices = {"bins": num_bins, "strategy": "class-wise", "norm": "l1"}
    members = [ScoreForm("ece", choices, False, bounds=(0.0, 1.0))]
    if labels is None:
        return ScoreGroup(members, None, NO_LABELS)
    num_classes = probs.shape[1]

    def statistic(weights: NDArray) -> Floats:
        sums = np.zeros((num_classes * num_bins, len(weights)))
        for rows in row_blocks(len(probs), max(num_classes, len(weights))):
            gaps = _class_gaps(np.array(probs[rows], dtype=np.float64), labels[rows], num_bins)
            sums += gaps.T @ weights[:, rows].T.astype(np.float64)
        return (np.abs(sums).sum(axis=0) / (num_classes * total_weights(weights)))[:, None]

    has_several = labels.ndim == 2

    def judge(generator: np.random.Generator, level: float | None, groups: RowGroups | None) -> list[dict[str, Any]]:
        if groups is not None:
            return [_not_of_groups(level)]
        bins = class_bins(probs, labels, num_bins=num_bins)
        if not has_several:
            return judge_errors(bins, [total_form(float(bins.size.sum()))], generator, level)
        (found,) = judge_errors(bins, [total_form(float(bins.size.sum()))], generator, None)
        # The labels of one example are dependent. Independent draws have the right mean but too little spread for a
        # test, and the bootstrap interval would undercover because a label's error is biased upwards.
        return [{"floor": found["floor"], "interval": None}]

    def of_classes() -> list[list[float | None]]:
        sums = np.zeros(num_classes * num_bins)
        for rows in row_blocks(len(probs), num_classes):
            sums += _class_gaps(np.array(probs[rows], dtype=np.float64), labels[rows], num_bins).sum(axis=0)
        return [[float(value) for value in np.abs(sums).reshape(num_classes, -1).sum(axis=1) / max(1, len(probs))]]

    per_class = of_classes if has_several else None
    return ScoreGroup(members, statistic, cost=float(num_classes), against_chance=judge, per_class=per_class)


def class_bins(probs: NDArray, labels: NDArray, *, num_bins: int) -> Bins:
    """Return the non-empty bins of every class: its probability and whether it is the label.

    For two mutually exclusive classes, only the second is used: the first mirrors it, and the same gaps twice would
    look like twice the data. Labels of more classes are drawn as if independent, which keeps the spread of the error
    within 10%.
    """
    num_classes = probs.shape[1]
    is_mirrored = labels.ndim == 1 and num_classes == 2
    chosen = np.arange(num_classes)[-1:] if is_mirrored else np.arange(num_classes)
    sums = np.zeros((4, len(chosen) * num_bins))
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    for rows in row_blocks(len(probs), num_classes):
        block = np.array(probs[rows], dtype=np.float64)[:, chosen]
        place = np.searchsorted(edges[1:-1], block, side="left") + num_bins * np.arange(len(chosen))
        own = labels[rows]
        is_label = own[:, None] == chosen if own.ndim == 1 else own != 0
        for total, values in zip(sums, (np.ones_like(block), block, block**2, is_label), strict=True):
            total += np.bincount(place.ravel(), weights=values.ravel(), minlength=len(total))
    return Bins(*sums[:, sums[0] > 0])


def _class_gaps(probs: NDArray, labels: NDArray, num_bins: int) -> sparse.csr_array:
    """Return probability minus one-hot label by example (rows) and class and bin (columns); overwrites probs."""
    size, num_classes = probs.shape
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    column = np.searchsorted(edges[1:-1], probs, side="left") + num_bins * np.arange(num_classes)
    if labels.ndim == 1:
        probs[np.arange(size), labels] -= 1
    else:
        probs -= labels
    starts = np.arange(0, probs.size + 1, num_classes)
    return sparse.csr_array((probs.ravel(), column.ravel(), starts), shape=(size, num_classes * num_bins))


class GapSums(NamedTuple):
    """Sums (n, B) over an example's labels, or a group's rows, per probability bin: count, probabilities, events, p (1 - p)."""

    size: Floats
    stated: Floats
    observed: Floats
    variance: Floats


def pooled_calibration(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> ScoreGroup:
    """Return the ECE pooled over all decisions of multi-label predictions: is a label as frequent as its probability states.

    All N L binary decisions are pooled in equal-width bins of the label's probability (Guo et al. 2017, eq. (3)). The
    labels of one example are dependent, whatever the model predicts. Floor, test and interval therefore use the
    covariance of whole examples as noise (cluster-robust: Liang and Zeger 1986, Biometrika 73, 13).

    Args:
        probs: (N, L); may be memory-mapped.
        labels: (N, L) zeros and ones, or None.
    """
    choices = {"bins": num_bins, "strategy": "equal-width", "norm": "l1", "average": "micro"}
    members = [ScoreForm("ece", choices, False, bounds=(0.0, 1.0))]
    if labels is None:
        return ScoreGroup(members, None, NO_LABELS)
    sums, num_labels = _label_sums(probs, labels, num_bins), probs.shape[1]
    gaps = sums.stated - sums.observed

    def statistic(weights: NDArray) -> Floats:
        size = np.maximum(1, num_labels * total_weights(weights))
        return np.abs(weights.astype(np.float64) @ gaps).sum(axis=1, keepdims=True) / size[:, None]

    def judge(generator: np.random.Generator, level: float | None, groups: RowGroups | None) -> list[dict[str, Any]]:
        own = sums
        if groups is not None:
            own = GapSums(*(np.stack([groups.sums(column) for column in part.T], axis=1) for part in sums))
        return [_judge_sums(own, generator, level, size=float(max(1, probs.size)))]

    return ScoreGroup(members, statistic, against_chance=judge)


def _judge_sums(sums: GapSums, generator: np.random.Generator, level: float | None, *, size: float) -> dict[str, Any]:
    """Return floor, test and, given a level, interval of an ECE over `size` events with the noise of whole rows of sums."""
    if len(sums.size) < 2:
        return _not_of_groups(level)
    drawn, form = _clustered_gaps(sums, generator), total_form(size)
    return noise_floor(drawn, form) if level is None else judge_error(drawn, form, level=level)


def _clustered_gaps(sums: GapSums, generator: np.random.Generator) -> Gaps:
    """Return the gaps of the non-empty bins, with normal noise of the examples' (or groups') own covariance.

    A calibrated model's total variance is at least that of independent labels; identical examples show no variance.
    """
    is_used = sums.size.sum(axis=0) > 0
    own = (sums.stated - sums.observed)[:, is_used]
    centred = own - own.mean(axis=0)
    covariance = centred.T @ centred * len(own) / max(1, len(own) - 1)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    calibrated, noise = (generator.standard_normal((NUM_DRAWS, len(root))) @ root.T for _ in range(2))
    independent = sums.variance.sum(axis=0)[is_used]
    lacking = max(0.0, 1 - float(np.trace(covariance)) / max(float(independent.sum()), 1e-300))
    calibrated = calibrated + generator.standard_normal(calibrated.shape) * np.sqrt(lacking * independent)
    events = (sums.stated / np.maximum(sums.size, 1)).sum(axis=0)  # the labels of one example may all be equal
    return Gaps(own.sum(axis=0), calibrated, noise, events[is_used] < FEWEST_EVENTS)


def label_reliability(probs: NDArray, labels: NDArray, *, num_bins: int = NUM_BINS) -> Reliability:
    """Return counts, mean probabilities and shares of present labels in bins of equal width of all N L probabilities."""
    totals = [part.sum(axis=0) for part in _label_sums(probs, labels, num_bins)[:3]]
    size = np.where(totals[0] > 0, totals[0], np.nan)
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    return Reliability(edges, totals[0].astype(np.int64), confidence=totals[1] / size, accuracy=totals[2] / size)


def _label_sums(probs: NDArray, labels: NDArray, num_bins: int) -> GapSums:
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    found = np.zeros((4, len(probs), num_bins))
    for rows in row_blocks(*probs.shape):
        block, own = np.array(probs[rows], dtype=np.float64), np.asarray(labels[rows]) != 0
        place = np.searchsorted(edges[1:-1], block, side="left") + num_bins * np.arange(len(block))[:, None]
        for total, values in zip(found, (np.ones_like(block), block, own, block * (1 - block)), strict=True):
            sums = np.bincount(place.ravel(), weights=values.ravel(), minlength=len(block) * num_bins)
            total[rows] = sums.reshape(len(block), num_bins)
    return GapSums(*found)
