"""Whether a predictive is worse than the plainer ones that it should replace, on the same labelled examples.

The differences of two predictives' losses are skewed: where one hedges and the other is sure, most differences are small
and of one sign, a few large and of the other, and a sample that happens to lack those looks like proof. At a level of 1 %
Student's t then rejects a true null up to ten times in a hundred (tests/evaluation/test_excess.py). Hall (1992), On the removal of
skewness by transformation, JRSS B 54: the t statistic corrected for the sample's own skewness, eq. (2.6), monotone in it.
Many references: Holm (see paired.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import label_reliability, reliability
from bnncli.evaluation.example_statistics import examples_of
from bnncli.evaluation.label_statistics import THRESHOLD
from bnncli.evaluation.paired import holm, skewness_of
from bnncli.evaluation.weighted_scores import nll_per_example
from bnncli.lazy import special

FALSE_ALARM = 0.05  # chance of any warning where no reference is better in truth
_LIKELY = 0.1  # a p-value above it decides nothing
_RELABELLINGS = 2000
_DRAWN_AT_ONCE = 2**22
WORSE_SHARE = 0.01  # of the reference's NLL: a loss below it is not worth a warning, however sure it is


@dataclass(frozen=True)
class Scored:
    """One predictive on labelled examples.

    Args:
        name: as messages and JSON have it.
        losses: (N,) negative log probability of each label, nats.
        ece: in 15 bins of equal width; None where there are no probabilities of all classes.
        is_right: (N,) whether the most probable class is the label; where an example has several labels, the share that is right at
            one half. None where there are no probabilities of all classes.
    """

    name: str
    losses: NDArray[np.float64]
    ece: float | None = None
    is_right: NDArray | None = None

    @property
    def nll(self) -> float:
        """Mean loss, nats an example."""
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions; None where unknown."""
        return None if self.is_right is None else float(self.is_right.mean())

    @property
    def standard_error(self) -> float | None:
        """Of the mean loss; None for one example."""
        return float(self.losses.std(ddof=1) / math.sqrt(len(self.losses))) if len(self.losses) > 1 else None

    def to_json(self) -> dict[str, float | None]:
        """`nll`, its `standard_error`, `ece`, `accuracy`."""
        return {"nll": self.nll, "standard_error": self.standard_error, "ece": self.ece, "accuracy": self.accuracy}


@dataclass(frozen=True)
class Excess:
    """How much worse one predictive is than a reference.

    Args:
        reference: its name.
        value: mean of the paired differences of the losses, nats an example; above 0 the reference is better.
        standard_error: of it; None for one example.
        p_adjusted: one-sided, of the null that the reference is not better, by Holm over all references; None untold.
        is_worse: p_adjusted is at most the level, and the value more than WORSE_SHARE of the reference's NLL.
    """

    reference: str
    value: float
    standard_error: float | None
    p_adjusted: float | None
    is_worse: bool

    def to_json(self) -> dict[str, Any]:
        """All but the name, as JSON takes it."""
        shown = {"value": self.value, "standard_error": self.standard_error}
        return {**shown, "p_adjusted": self.p_adjusted, "is_worse": self.is_worse}


def score(name: str, probs: NDArray, labels: NDArray, *, losses: NDArray[np.float64] | None = None) -> Scored:
    """A predictive with class probabilities (N, C) at examples with labels (N,), or (N, C) where there are several, N at least 1.

    Args:
        losses: (N,), in place of those of probs: held-out ones, for what was fitted to these labels.
    """
    if labels.ndim == 1:
        examples = examples_of(probs, labels)
        bins, is_right = reliability(examples), examples.is_right
    else:
        bins, is_right = label_reliability(probs, labels), ((probs >= THRESHOLD) == (labels > 0)).mean(axis=1)
    gaps = np.nan_to_num(np.abs(bins.accuracy - bins.confidence))
    ece = float((bins.count * gaps).sum() / bins.count.sum())
    return Scored(name, nll_per_example(probs, labels) if losses is None else losses, ece, is_right)


def excesses(chosen: Scored, references: Sequence[Scored], *, level: float = FALSE_ALARM) -> list[Excess]:
    """How much worse `chosen` is than each of the references, on the same examples.

    Where none of them is better in truth, the chance that any `is_worse` is at most the level.
    """
    gaps = [chosen.losses - reference.losses for reference in references]
    p_values = [worse_p_value(chosen.losses, reference.losses) for reference in references]
    found = []
    for reference, gap, p in zip(references, gaps, holm(p_values), strict=True):
        value = float(gap.mean())
        error = float(gap.std(ddof=1) / math.sqrt(len(gap))) if len(gap) > 1 else None
        is_worse = p is not None and p <= level and value > WORSE_SHARE * reference.nll
        found.append(Excess(reference.name, value, error, p, is_worse))
    return found


@dataclass(frozen=True)
class Relabelled:
    """The differences of two predictives' losses under labels drawn so that neither is better.

    One loses -log q at the observed label of an example, the other -log p: had it been any other label, about -log(1 - q) and
    -log(1 - p). Their difference has mean 0 under one probability of the observed label, which lies between p and q.

    Args:
        seen, unseen: (M,) differences at the observed label and at any other, of the examples where there is one.
        share: (M,) probability of the observed label.
        sums: (R,) draws of the sum of differences; its mean is 0.
    """

    seen: NDArray[np.float64]
    unseen: NDArray[np.float64]
    share: NDArray[np.float64]
    sums: NDArray[np.float64]

    @classmethod
    def of(cls, losses: NDArray, reference: NDArray) -> Relabelled:
        """That of losses (N,) and a reference's, nats."""
        least = -math.log1p(-1e-12)
        own, other = (np.maximum(np.asarray(part, dtype=np.float64), least) for part in (losses, reference))
        seen, unseen = own - other, np.log(-np.expm1(-other)) - np.log(-np.expm1(-own))
        differs = seen * unseen < 0  # else both are zero
        seen, unseen = seen[differs], unseen[differs]
        share = unseen / (unseen - seen)
        generator, sums = np.random.default_rng(0), np.full(_RELABELLINGS, unseen.sum())
        size = max(1, _DRAWN_AT_ONCE // max(1, len(seen)))
        for begin in range(0, _RELABELLINGS, size):
            count = min(size, _RELABELLINGS - begin)
            is_seen = generator.random((count, len(seen)), dtype=np.float32) < share
            sums[begin : begin + count] += is_seen @ (seen - unseen)
        return cls(seen, unseen, share, sums)

    def opposite(self) -> Relabelled:
        """That of the reference against the other."""
        return Relabelled(-self.seen, -self.unseen, self.share, -self.sums)

    def p_value(self, total: float) -> float:
        """The probability that the sum reaches a total: the share of draws, or where none does Chernoff's bound, if lower."""
        reached = int(np.count_nonzero(self.sums >= total - 1e-9 * abs(total)))
        found = (1 + reached) / (len(self.sums) + 1)
        variance = float((-self.seen * self.unseen).sum())
        if reached or not variance:
            return found
        logs = np.stack([np.log(self.share), np.log1p(-self.share)])
        rates = total / variance * np.geomspace(1 / 16, 16, 17)  # any bounds it; that of a normal is in the middle
        bounds = [float(np.logaddexp(*(logs + rate * np.stack([self.seen, self.unseen]))).sum()) for rate in rates]
        exponents = [bound - rate * total for bound, rate in zip(bounds, rates, strict=True)]
        return min(found, math.exp(min(0.0, *exponents)))  # a bound above one says nothing


def worse_p_value(losses: NDArray, reference: NDArray, relabelled: Relabelled | None = None) -> float | None:
    """One-sided p-value of the null that the mean of losses (N,), nats, is not above that of a reference's (N,); None untold.

    Args:
        relabelled: of both, where it is at hand.
    """
    found = p_value(np.asarray(losses) - np.asarray(reference))
    if found is None or found > _LIKELY:
        return found
    relabelled = relabelled or Relabelled.of(losses, reference)
    return max(found, relabelled.p_value(float(np.sum(losses) - np.sum(reference))))


def p_value(differences: NDArray) -> float | None:
    """One-sided p-value of the null that the mean of differences (N,) is not above 0.

    Hall's T = sqrt(N) (S + g S^2 / 3 + g^2 S^3 / 27 + g / (6 N)), with S the mean over the standard deviation and g the
    skewness, against Student's t with N - 1 degrees. 1 for differences that are all 0; None where they do not vary
    otherwise, or are fewer than two, and tell no variance.
    """
    values = np.asarray(differences, dtype=np.float64)
    size = len(values)
    if size < 2 or np.ptp(values) == 0:
        return 1.0 if size and not values.any() else None
    ratio, skewness = values.mean() / values.std(ddof=1), skewness_of(values)
    corrected = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * size)
    return float(special.stdtr(size - 1, -math.sqrt(size) * corrected))
