"""Test whether a predictive is worse than the simpler ones it should replace, on the same labelled examples.

Differences of two predictives' losses are skewed. If one hedges and the other is sure, most differences are small and
of one sign, a few are large and of the other, and a sample without the large ones looks like evidence. At a level of
1%, Student's t then rejects a true null in up to 10% of samples (tests/evaluation/test_excess.py). The test therefore
corrects the t statistic for the sample's skewness by a monotone transformation: Hall (1992), On the removal of skewness
by transformation, JRSS B 54, eq. (2.6). Several references: Holm (see paired.py).
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

FALSE_ALARM = 0.05  # probability of any warning if no reference is truly better
_LIKELY = 0.1  # a larger p-value is not refined
_RELABELLINGS = 2000
_DRAWN_AT_ONCE = 2**22
WORSE_SHARE = 0.01  # of the reference's NLL: smaller losses are not worth a warning, however significant


@dataclass(frozen=True)
class Scored:
    """A predictive on labelled examples.

    Args:
        name: used in messages and JSON.
        losses: (N,) negative log probability of each label, nats.
        ece: expected calibration error in 15 bins of equal width; None without probabilities of all classes.
        is_right: (N,) whether the most probable class is the label; for multi-label predictions, the share of labels
            that are right at threshold 0.5. None without probabilities of all classes.
    """

    name: str
    losses: NDArray[np.float64]
    ece: float | None = None
    is_right: NDArray | None = None

    @property
    def nll(self) -> float:
        """Mean loss, nats per example."""
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions; None if unknown."""
        return None if self.is_right is None else float(self.is_right.mean())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean loss; None for one example."""
        return float(self.losses.std(ddof=1) / math.sqrt(len(self.losses))) if len(self.losses) > 1 else None

    def to_json(self) -> dict[str, float | None]:
        """Return `nll`, its `standard_error`, `ece` and `accuracy`."""
        return {"nll": self.nll, "standard_error": self.standard_error, "ece": self.ece, "accuracy": self.accuracy}


@dataclass(frozen=True)
class Excess:
    """By how much a predictive is worse than a reference.

    Args:
        reference: name of the reference.
        value: mean paired difference of the losses, nats per example; positive if the reference is better.
        standard_error: standard error of the value; None for one example.
        p_adjusted: one-sided p-value of the null that the reference is not better, Holm-adjusted over references; None
            if undefined.
        is_worse: p_adjusted is at most the level and the value exceeds WORSE_SHARE of the reference's NLL.
    """

    reference: str
    value: float
    standard_error: float | None
    p_adjusted: float | None
    is_worse: bool

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the name."""
        shown = {"value": self.value, "standard_error": self.standard_error}
        return {**shown, "p_adjusted": self.p_adjusted, "is_worse": self.is_worse}


def score(name: str, probs: NDArray, labels: NDArray, *, losses: NDArray[np.float64] | None = None) -> Scored:
    """Score class probabilities (N, C) on labels (N,), or (N, C) for multi-label predictions; N >= 1.

    Args:
        losses: (N,), replace the losses of probs; for example out-of-fold losses of a model fitted to these labels.
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
    """Compare `chosen` with each reference on the same examples.

    If no reference is truly better, any `is_worse` is True with probability at most the level.
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
    """Differences of two predictives' losses under labels drawn so that neither is better.

    At an example's observed label, one predictive loses -log q and the other -log p; at any other label, about -log(1 -
    q) and -log(1 - p). The difference has mean 0 for exactly one probability of the observed label, which is between p
    and q.

    Args:
        seen, unseen: (M,) non-zero differences at the observed label and at any other label.
        share: (M,) that probability of the observed label.
        sums: (R,) draws of the sum of differences; mean 0.
    """

    seen: NDArray[np.float64]
    unseen: NDArray[np.float64]
    share: NDArray[np.float64]
    sums: NDArray[np.float64]

    @classmethod
    def of(cls, losses: NDArray, reference: NDArray) -> Relabelled:
        """Draw the differences between losses (N,) and the reference's, nats."""
        least = -math.log1p(-1e-12)
        own, other = (np.maximum(np.asarray(part, dtype=np.float64), least) for part in (losses, reference))
        seen, unseen = own - other, np.log(-np.expm1(-other)) - np.log(-np.expm1(-own))
        differs = seen * unseen < 0  # otherwise both are zero
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
        """Return the same draws with the two predictives exchanged."""
        return Relabelled(-self.seen, -self.unseen, self.share, -self.sums)

    def p_value(self, total: float) -> float:
        """Return the probability that the sum reaches `total`: the share of draws, or Chernoff's bound if lower and none does."""
        reached = int(np.count_nonzero(self.sums >= total - 1e-9 * abs(total)))
        found = (1 + reached) / (len(self.sums) + 1)
        variance = float((-self.seen * self.unseen).sum())
        if reached or not variance:
            return found
        logs = np.stack([np.log(self.share), np.log1p(-self.share)])
        # each gives a bound; the one of a normal is in the middle
        rates = total / variance * np.geomspace(1 / 16, 16, 17)
        bounds = [float(np.logaddexp(*(logs + rate * np.stack([self.seen, self.unseen]))).sum()) for rate in rates]
        exponents = [bound - rate * total for bound, rate in zip(bounds, rates, strict=True)]
        return min(found, math.exp(min(0.0, *exponents)))  # bounds above 1 are vacuous


def worse_p_value(losses: NDArray, reference: NDArray, relabelled: Relabelled | None = None) -> float | None:
    """Test whether the mean of losses (N,) exceeds that of a reference; return a one-sided p-value, None if undefined.

    Args:
        relabelled: the draws for both, if already computed.
    """
    found = p_value(np.asarray(losses) - np.asarray(reference))
    if found is None or found > _LIKELY:
        return found
    relabelled = relabelled or Relabelled.of(losses, reference)
    return max(found, relabelled.p_value(float(np.sum(losses) - np.sum(reference))))


def p_value(differences: NDArray) -> float | None:
    """Test whether the mean of differences (N,) is above 0; return a one-sided p-value.

    Compares Hall's T = sqrt(N) (S + g S^2 / 3 + g^2 S^3 / 27 + g / (6 N)) with Student's t of N - 1 degrees of freedom,
    where S is the mean divided by the standard deviation and g the skewness. Returns 1 if all differences are 0, and
    None if they are otherwise constant or fewer than two.
    """
    values = np.asarray(differences, dtype=np.float64)
    size = len(values)
    if size < 2 or np.ptp(values) == 0:
        return 1.0 if size and not values.any() else None
    ratio, skewness = values.mean() / values.std(ddof=1), skewness_of(values)
    corrected = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * size)
    return float(special.stdtr(size - 1, -math.sqrt(size) * corrected))
