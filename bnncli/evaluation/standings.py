"""Rank posteriors in a column of scores: against the best of them, or against a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bnncli.evaluation.confidence_set import confidence_set
from bnncli.evaluation.paired import Difference, Sample, difference, holm


@dataclass(frozen=True)
class Standing:
    """The standing of one posterior in a column of scores.

    Args:
        against: its score minus that of the best or of the baseline; None for that one itself, or if undefined. The
            interval is pointwise against a baseline, and simultaneous over all pairs against the best. The latter has
            no p-value, because the pair was chosen for its difference.
        p_adjusted: against a baseline, Holm-adjusted p-value of no difference; else p-value of being among the best.
        is_best: it is the best.
        is_close: it is not significantly worse than any other.
    """

    against: Difference | None = None
    p_adjusted: float | None = None
    is_best: bool = False
    is_close: bool = False


def standings(
    samples: Sequence[Sample | None], *, higher_is_better: bool | None, alpha: float, baseline: int | None = None
) -> list[Standing]:
    """Return the standing of each score of a column against the best, or against the one at `baseline`.

    Args:
        samples: None if undefined. The first of tied best ones is the best.
        higher_is_better: None if no direction is better, and none is the best.
        alpha: level of the joint test; 1 - alpha is the level of each interval against a baseline, and the simultaneous
            level of the intervals against the best.
    """
    known = {place: sample for place, sample in enumerate(samples) if sample is not None}
    sign = 1 if higher_is_better else -1
    best = max(known, key=lambda place: (sign * known[place].mean, -place), default=None)
    best = None if higher_is_better is None else best
    if baseline is not None:
        return _against_baseline(samples, baseline, best, alpha)
    if best is None or higher_is_better is None:
        return [Standing() for _ in samples]
    found = confidence_set(samples, higher_is_better=higher_is_better, alpha=alpha)
    standing = []
    for place in range(len(samples)):
        if place not in known:
            standing.append(Standing())
            continue
        p = found.p_values[place]
        against = None if place == best else _from_best(known[place], known[best], float(found.reach[place, best]))
        standing.append(Standing(against, p, place == best, p is None or p > alpha))
    return standing


def fewest_replicates(num_others: int, *, alpha: float, has_baseline: bool) -> int:
    """Return the number of replicates at which the p-value of one of several comparisons can be alpha."""
    # Without a baseline the remaining ones are tested together; confidence_set.py omits its bounds if replicates are
    # few.
    return int((num_others if has_baseline else 1) / alpha) + 1


def _against_baseline(
    samples: Sequence[Sample | None], baseline: int, best: int | None, alpha: float
) -> list[Standing]:
    """Return differences from the baseline, tested with Holm."""
    reference = samples[baseline]
    if reference is None:
        return [Standing(is_best=place == best, is_close=place == best) for place in range(len(samples))]
    found = {
        place: difference(sample, reference, level=1 - alpha)
        for place, sample in enumerate(samples)
        if sample is not None and place != baseline
    }
    adjusted = dict(zip(found, holm([one.p_value for one in found.values()]), strict=True))
    return [
        Standing(found.get(place), adjusted.get(place), place == best, place == best) for place in range(len(samples))
    ]


def _from_best(own: Sample, best: Sample, reach: float) -> Difference:
    """Return the difference from the best, with the simultaneous interval."""
    found = difference(own, best)
    low, high = (found.value - reach, found.value + reach) if np.isfinite(reach) else (None, None)
    return replace(found, low=low, high=high, p_value=None)
