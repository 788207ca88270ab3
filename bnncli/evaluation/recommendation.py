"""Recommend a predictive: the one verdict that auto, diagnose and report quote.

A predictive is a posterior with an integrator. On a labelled val split it is compared with the network, either
temperature scaled or as trained, whichever has the lower NLL (the baseline):

1. A predictive with significantly lower accuracy is excluded, unless requested otherwise.
2. Of those whose NLL is significantly lower by more than MARGIN, take the simplest that no other beats by as much.
3. The stack, which has the network at one temperature as a member, is taken if its out-of-fold NLL is lower at all:
with weights chosen out of fold it can cost at most a few members divided by the number of rows.
4. Otherwise take the baseline.

Outliers play no role in this choice: the combined score of the features detects them, the same for every posterior.

Significant means that the central 95% interval of the paired difference excludes zero: for NLL by the test of excess.py
with Holm over all predictives, for accuracy by Tango's score interval (1998, Statistics in Medicine 17), whose test of
zero is McNemar's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.excess import WORSE_SHARE, Scored, excesses
from bnncli.evaluation.layer_gain import LEVEL, mean_interval
from bnncli.lazy import special
from bnncli.names import percent

MARGIN = WORSE_SHARE
PLAIN = {"temperature": "temperature scaling", "network": "the network as trained"}
FALSE_ALARM = 0.05
_ONE_SIDED = (1 - LEVEL) / 2
_STEPS = 60  # bisection steps: to the last bit of a difference of accuracies


@dataclass(frozen=True)
class Predictive:
    """A posterior with an integrator, and its scores on val.

    Attributes:
        has_network: whether the network at one temperature is a member, with a weight chosen out of fold.
    """

    posterior: str
    integrator: str
    scored: Scored
    has_network: bool = False

    def __str__(self) -> str:
        return f"{self.posterior} ({self.integrator})"


@dataclass(frozen=True)
class Quality:
    """One score of a predictive beside that of the baseline, on the same examples.

    Attributes:
        score: nll, accuracy or ece.
        value, baseline: the two scores; nats for NLL, else fractions.
        difference, low, high: value minus baseline, with its central 95% interval; None if unknown.
        higher_is_better: direction of the score.
    """

    score: str
    value: float
    baseline: float
    low: float | None
    high: float | None
    higher_is_better: bool

    @property
    def difference(self) -> float:
        """Value minus baseline."""
        return self.value - self.baseline

    @property
    def finding(self) -> str:
        """better, worse, or no significant difference."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "no significant difference"
        return "better" if (self.low > 0) == self.higher_is_better else "worse"

    @property
    def title(self) -> str:
        """Title of the score in tables."""
        return self.score if self.score == "accuracy" else self.score.upper()

    @property
    def cells(self) -> list[str]:
        """Score, value, baseline, difference, interval and finding as table cells."""
        interval = "-" if self.low is None or self.high is None else f"{self.low:+.4f} to {self.high:+.4f}"
        shown = [f"{self.value:.4f}", f"{self.baseline:.4f}", f"{self.difference:+.4f}"]
        return [self.title, *shown, interval, self.finding]

    def to_json(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        return {**asdict(self), "difference": self.difference, "finding": self.finding}


@dataclass(frozen=True)
class Recommendation:
    """The predictive to use.

    Attributes:
        chosen: a predictive; None for the baseline.
        contender: the predictive to compare with the baseline in words: the chosen one, else the one with the lowest
            NLL among those that keep the accuracy; None if there is none.
        pays: whether the chosen one has a significantly lower NLL than the baseline, by more than the margin.
        why: the reason, in words.
    """

    chosen: Predictive | None
    contender: Predictive | None
    pays: bool
    why: str


def recommend(
    candidates: Sequence[Predictive],
    baseline: Scored | None,
    *,
    words: str = PLAIN["temperature"],
    keep_accuracy: bool = True,
) -> Recommendation:
    """Recommend a predictive.

    Args:
        candidates: simplest first.
        baseline: the plain network; None for features without a head, when candidates are only compared with each
            other.
        words: name of the baseline, one of PLAIN.
        keep_accuracy: exclude candidates with significantly lower accuracy.
    """
    if not candidates:
        return Recommendation(None, None, False, "no posterior was fitted")
    if baseline is None:
        return _best_of(candidates, "no other posterior is significantly better")
    losing = [one for one in candidates if keep_accuracy and loses_accuracy(one.scored, baseline)]
    kept = [one for one in candidates if not any(one is other for other in losing)]
    gaps = excesses(baseline, [one.scored for one in candidates], level=_ONE_SIDED)
    winners = [one for one, gap in zip(candidates, gaps, strict=True) if gap.is_worse]
    winners = [one for one in winners if any(one is other for other in kept)]
    lead = f"(by more than {percent(MARGIN, 'g')})"
    mixture = next((one for one in kept if one.has_network and one.scored.nll < baseline.nll), None)
    if mixture is not None and not any(one is mixture for one in winners):
        found = _best_of(
            [mixture, *winners],
            f"the gain over {words} is not significant, but the mixture includes the network, and no other choice has a "
            f"significantly lower NLL {lead}",
        )
        if found.chosen is mixture:
            return found
    if winners:
        found = _best_of(winners, "no other posterior improves on it significantly")
        return replace(
            found, pays=True, why=f"its NLL is significantly lower than that of {words} {lead}, and {found.why}"
        )
    why = f"no posterior has a significantly lower NLL {lead}"
    if losing:
        names = ", ".join(dict.fromkeys(one.posterior for one in losing))
        why += f" without losing accuracy ({names} lost some)"
    return Recommendation(None, min(kept or candidates, key=_nll), False, why)


def _best_of(candidates: Sequence[Predictive], why: str) -> Recommendation:
    """Return the simplest candidate that no other beats significantly by the margin."""
    for one in candidates:
        others = [other.scored for other in candidates if other is not one]
        if not any(gap.is_worse for gap in excesses(one.scored, others, level=_ONE_SIDED)):
            return Recommendation(one, one, False, why)
    raise AssertionError("no other candidate beats the one with the lowest NLL")


def _nll(one: Predictive) -> float:
    return one.scored.nll


def sentence(found: Recommendation, baseline: Scored | None, plain: str, words: str = PLAIN["temperature"]) -> str:
    """Return the recommendation in words, with NLL, accuracy and ECE on val.

    Args:
        plain: name of the baseline's posterior in the run.
        words: as in recommend.
    """
    chosen, contender = found.chosen, found.contender
    start = f"predict with {plain} ({words})" if chosen is None else f"predict with {chosen}"
    if contender is None:
        return f"{start}: {found.why}"
    own = contender.scored
    if baseline is None:
        return f"{start}: on val {_scores(own)}; {found.why}"
    numbers = [f"NLL {own.nll:.4f} against {baseline.nll:.4f}"]
    if own.accuracy is not None and baseline.accuracy is not None:
        numbers.append(f"accuracy {percent(own.accuracy)} against {percent(baseline.accuracy)}")
    if own.ece is not None and baseline.ece is not None:
        numbers.append(f"ECE {percent(own.ece)} against {percent(baseline.ece)}")
    if chosen is None:
        return f"{start}: {found.why}; on val the best one, {contender}, has {', '.join(numbers)}"
    return f"{start}: on val {', '.join(numbers)}; {found.why}"


@dataclass(frozen=True)
class Detected:
    """How well the default score separates val from an out-of-distribution split.

    Attributes:
        auroc, low, high: AUROC with its central 95% interval; None if unknown.
        caught: share of the split detected at FALSE_ALARM false alarms on val.
    """

    ood: str
    score: str
    auroc: float
    low: float | None
    high: float | None
    caught: float

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.ood} AUROC {self.auroc:.3f}{interval}, {percent(self.caught)} detected"


def detection_sentence(found: Sequence[Detected]) -> str:
    """Return the detection results of the default score, in words."""
    if not found:
        return "OOD detection is unknown, because the run has no out-of-distribution split"
    score, texts = found[0].score, "; ".join(map(str, found))
    alarms = percent(FALSE_ALARM, "g")
    return f"OOD detection by the {score} score (the same for all posteriors), at {alarms} false alarms on val: {texts}"


def _scores(own: Scored) -> str:
    accuracy = "" if own.accuracy is None else f", accuracy {percent(own.accuracy)}"
    return f"NLL {own.nll:.4f}{accuracy}" + ("" if own.ece is None else f", ECE {percent(own.ece)}")


def loses_accuracy(own: Scored, baseline: Scored) -> bool:
    """Return whether a predictive is significantly less accurate than the baseline, at 2.5%."""
    if own.is_right is None or baseline.is_right is None:
        return False
    found = accuracy_interval(own.is_right, baseline.is_right)
    return found is not None and found[1] < 0


def accuracy_interval(own: NDArray, other: NDArray, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the central interval of the difference of two accuracies on the same examples.

    Tango (1998), eq. (4): all differences that the score test does not reject. Shares of right labels other than 0 and
    1 get Hall's interval of the mean difference.

    Args:
        own, other: (N,), whether each example is right, or the share of its labels that are.

    Returns:
        None if shares never differ, or without examples.
    """
    gaps = np.asarray(own, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if not np.isin(gaps, (-1.0, 0.0, 1.0)).all():
        return mean_interval(gaps, level)
    won, lost, size = int((gaps > 0).sum()), int((gaps < 0).sum()), len(gaps)
    if size == 0:
        return None
    reach = float(special.ndtri((1 + level) / 2))
    value = (won - lost) / size

    def end(sign: float) -> float:
        near, far = value, sign
        for _ in range(_STEPS):
            middle = (near + far) / 2
            if abs(_tango(won, lost, size, middle)) <= reach:
                near = middle
            else:
                far = middle
        return near

    return end(-1.0), end(1.0)


def _tango(won: int, lost: int, size: int, difference: float) -> float:
    """Return the score statistic of a difference of paired proportions, Tango (1998), eq. (3)."""
    a, c = 2 * size, -lost * difference * (1 - difference)
    b = -won - lost + (2 * size - won + lost) * difference
    rest = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = size * (2 * rest + difference * (1 - difference))
    gap = won - lost - size * difference
    return 0.0 if gap == 0 else math.copysign(math.inf, gap) if variance <= 0 else gap / math.sqrt(variance)
