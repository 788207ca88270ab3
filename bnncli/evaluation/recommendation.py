"""The rule that recommends a predictive, which auto, diagnose and report quote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import label_reliability, reliability
from bnncli.evaluation.comparison import holm, sample_skewness, skewed_interval
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.statistics import THRESHOLD, compute_example_statistics, nll_per_example
from bnncli.lazy import special
from bnncli.names import percent

LEVEL = 0.95


@dataclass(frozen=True)
class LayerGain:
    """Comparison of a posterior over other layers with one over the last layer.

    Args:
        posterior, last_layer: names of the two.
        value: NLL of the first minus NLL of the second, nats per example; negative if other layers predict better.
        low, high: central 95% interval of the value; None for one example or constant differences.
        p_adjusted: two-sided p-value of no difference, Holm-adjusted over the posteriors over other layers; None if
            undefined.
        margin: 1% of the second's NLL.
        num_compared: number of posteriors that p_adjusted accounts for; the interval is unadjusted.
    """

    posterior: str
    last_layer: str
    value: float
    low: float | None
    high: float | None
    p_adjusted: float | None
    margin: float
    num_compared: int = 1

    @property
    def finding(self) -> str:
        """Finding about the posterior relative to the last layer: better, worse, as good, or untold."""
        if self.p_adjusted is not None and self.p_adjusted <= 1 - LEVEL:
            return "better" if self.value < 0 else "worse"
        is_same = self.low is None and self.p_adjusted == 1  # all losses are equal
        return "as good" if is_same or (self.low is not None and self.low >= -self.margin) else "untold"

    @property
    def sentence(self) -> str:
        """The finding with its numbers, for people."""
        says = {
            "better": f"{self.posterior} predicts better than the last-layer posterior {self.last_layer}",
            "worse": f"the last-layer posterior {self.last_layer} predicts better than {self.posterior}",
            "as good": f"the last-layer posterior {self.last_layer} predicts as well as {self.posterior}",
            "untold": f"val is too small to distinguish {self.posterior} from the last-layer posterior {self.last_layer}",
        }[self.finding]
        interval = "no interval" if self.low is None else f"95% interval {self.low:+.4f} to {self.high:+.4f}"
        shown = "p unknown" if self.p_adjusted is None else f"p {self.p_adjusted:.2g}"
        allows = f" after Holm correction for {self.num_compared} posteriors" if self.num_compared > 1 else ""
        return f"{says}: val NLL {self.value:+.4f} ({interval}, {shown}{allows}, paired)"

    def to_json(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        names = {"posterior": self.posterior, "last_layer": self.last_layer}
        numbers = {"value": self.value, "low": self.low, "high": self.high, "p_adjusted": self.p_adjusted}
        more = {"margin": self.margin, "num_compared": self.num_compared}
        return {**names, **numbers, **more, "finding": self.finding, "sentence": self.sentence}


def layer_gains(
    losses: Mapping[str, NDArray[np.float64]],
    counterparts: Mapping[str, tuple[str, NDArray[np.float64]]],
    *,
    groups: RowGroups | None = None,
) -> list[LayerGain]:
    """Return the gains of posteriors over other layers.

    Args:
        losses: posterior name to losses (N,), nats, all of the same examples.
        counterparts: posterior name to name and losses of the last-layer posterior it is compared with, which must be
            chosen without looking at its losses.
        groups: groups of dependent examples, or None.
    """
    gaps = {name: own - counterparts[name][1] for name, own in losses.items()}
    found = []
    drawn = {name: RelabelledDifferences.of(own, counterparts[name][1]) for name, own in losses.items()}
    p_values = [_two_sided(own, counterparts[name][1], drawn[name], groups) for name, own in losses.items()]
    for (name, gap), p in zip(gaps.items(), holm(p_values), strict=True):
        other, theirs = counterparts[name]
        low, high = loss_interval(losses[name], theirs, drawn=drawn[name], groups=groups) or (None, None)
        margin = WORSE_SHARE * float(theirs.mean())
        found.append(LayerGain(name, other, float(gap.mean()), low, high, p, margin, len(gaps)))
    return found


def _two_sided(
    losses: NDArray, others: NDArray, drawn: RelabelledDifferences, groups: RowGroups | None
) -> float | None:
    sides = [
        worse_p_value(losses, others, drawn, groups=groups),
        worse_p_value(others, losses, drawn.opposite(), groups=groups),
    ]
    known = [side for side in sides if side is not None]
    return min(1.0, 2 * min(known)) if known else None


def loss_interval(
    losses: NDArray,
    others: NDArray,
    level: float = LEVEL,
    *,
    drawn: RelabelledDifferences | None = None,
    groups: RowGroups | None = None,
) -> tuple[float, float] | None:
    """Return the central interval of the mean of losses (N,) minus others (N,), nats; None if they have no variance.

    Hall's interval, widened by how far the mean strays under labels drawn so that neither is better.

    Args:
        drawn: the draws for both, if already computed.
        groups: groups of dependent rows, whose sums are the independent ones.
    """
    differences = np.asarray(losses) - np.asarray(others)
    found = mean_interval(independent_values(differences, groups), level)
    if found is None:
        return None
    drawn = drawn or RelabelledDifferences.of(losses, others)
    above, below = np.quantile(drawn.sums, [(1 + level) / 2, (1 - level) / 2]) / len(differences)
    value = float(np.mean(differences))
    return min(found[0], value - float(above)), max(found[1], value - float(below))


def independent_values(values: NDArray, groups: RowGroups | None) -> NDArray:
    """Return values (N,) of independent rows, or one value per group with the same mean."""
    return values if groups is None else groups.linearized(values)


def mean_interval(differences: NDArray, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the central interval of the mean of differences (N,): all values that `excess.p_value` rejects on neither side.

    Returns None if the differences have no variance.
    """
    values = np.asarray(differences, dtype=np.float64)
    size = len(values)
    if size < 2 or np.ptp(values) == 0:
        return None
    reach = float(special.stdtrit(size - 1, (1 + level) / 2))
    error = float(values.std(ddof=1)) / math.sqrt(size)
    return skewed_interval(float(values.mean()), error, sample_skewness(values), size, reach)


FALSE_ALARM = 0.05  # probability of any warning if no reference is truly better
_LIKELY = 0.1  # a larger p-value is not refined
_RELABELLINGS = 2000
_DRAWN_AT_ONCE = 2**22
WORSE_SHARE = 0.01  # of the reference's NLL: smaller losses are not worth a warning, however significant


@dataclass(frozen=True)
class ScoredPredictive:
    """A predictive on labelled examples.

    Args:
        name: used in messages and JSON.
        losses: (N,) negative log probability of each label, nats.
        ece: expected calibration error in 15 bins of equal width; None without probabilities of all classes.
        is_right: (N,) whether the most probable class is the label; for multi-label predictions, the share of labels
            that are right at threshold 0.5. None without probabilities of all classes.
        groups: groups of dependent rows, or None.
    """

    name: str
    losses: NDArray[np.float64]
    ece: float | None = None
    is_right: NDArray | None = None
    groups: RowGroups | None = None

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
        return mean_error(self.losses, self.groups)

    def to_json(self) -> dict[str, float | None]:
        """Return `nll`, its `standard_error`, `ece` and `accuracy`."""
        return {"nll": self.nll, "standard_error": self.standard_error, "ece": self.ece, "accuracy": self.accuracy}


def mean_error(values: NDArray, groups: RowGroups | None = None) -> float | None:
    """Return the standard error of the mean of values (N,), of independent rows or groups; None for a single one."""
    own = independent_values(values, groups)
    return float(own.std(ddof=1) / math.sqrt(len(own))) if len(own) > 1 else None


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


def score_predictive(
    name: str,
    probs: NDArray,
    labels: NDArray,
    *,
    losses: NDArray[np.float64] | None = None,
    groups: RowGroups | None = None,
) -> ScoredPredictive:
    """Score class probabilities (N, C) on labels (N,), or (N, C) for multi-label predictions; N >= 1.

    Args:
        losses: (N,), replace the losses of probs; for example out-of-fold losses of a model fitted to these labels.
        groups: groups of dependent rows, or None.
    """
    if labels.ndim == 1:
        examples = compute_example_statistics(probs, labels)
        bins, is_right = reliability(examples), examples.is_right
    else:
        bins, is_right = label_reliability(probs, labels), ((probs >= THRESHOLD) == (labels > 0)).mean(axis=1)
    gaps = np.nan_to_num(np.abs(bins.accuracy - bins.confidence))
    ece = float((bins.count * gaps).sum() / bins.count.sum())
    return ScoredPredictive(name, nll_per_example(probs, labels) if losses is None else losses, ece, is_right, groups)


def compare_losses(
    chosen: ScoredPredictive, references: Sequence[ScoredPredictive], *, level: float = FALSE_ALARM
) -> list[Excess]:
    """Compare `chosen` with each reference on the same examples.

    If no reference is truly better, any `is_worse` is True with probability at most the level.
    """
    gaps = [chosen.losses - reference.losses for reference in references]
    p_values = [worse_p_value(chosen.losses, reference.losses, groups=chosen.groups) for reference in references]
    found = []
    for reference, gap, p in zip(references, gaps, holm(p_values), strict=True):
        value = float(gap.mean())
        error = mean_error(gap, chosen.groups)
        is_worse = p is not None and p <= level and value > WORSE_SHARE * reference.nll
        found.append(Excess(reference.name, value, error, p, is_worse))
    return found


@dataclass(frozen=True)
class RelabelledDifferences:
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
    def of(cls, losses: NDArray, reference: NDArray) -> RelabelledDifferences:
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

    def opposite(self) -> RelabelledDifferences:
        """Return the same draws with the two predictives exchanged."""
        return RelabelledDifferences(-self.seen, -self.unseen, self.share, -self.sums)

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


def worse_p_value(
    losses: NDArray,
    reference: NDArray,
    relabelled: RelabelledDifferences | None = None,
    *,
    groups: RowGroups | None = None,
) -> float | None:
    """Test whether the mean of losses (N,) exceeds that of a reference; return a one-sided p-value, None if undefined.

    Args:
        relabelled: the draws for both, if already computed.
        groups: groups of dependent rows, whose sums are the independent ones.
    """
    found = p_value(independent_values(np.asarray(losses) - np.asarray(reference), groups))
    if found is None or found > _LIKELY:
        return found
    relabelled = relabelled or RelabelledDifferences.of(losses, reference)
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
    ratio, skewness = values.mean() / values.std(ddof=1), sample_skewness(values)
    corrected = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * size)
    return float(special.stdtr(size - 1, -math.sqrt(size) * corrected))


MARGIN = WORSE_SHARE
PLAIN = {"temperature": "temperature scaling", "network": "the network as trained"}
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
    scored: ScoredPredictive
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
    baseline: ScoredPredictive | None,
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
    gaps = compare_losses(baseline, [one.scored for one in candidates], level=_ONE_SIDED)
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
        if not any(gap.is_worse for gap in compare_losses(one.scored, others, level=_ONE_SIDED)):
            return Recommendation(one, one, False, why)
    raise AssertionError("no other candidate beats the one with the lowest NLL")


def _nll(one: Predictive) -> float:
    return one.scored.nll


def recommendation_sentence(
    found: Recommendation, baseline: ScoredPredictive | None, plain: str, words: str = PLAIN["temperature"]
) -> str:
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
class DetectionResult:
    """Detection of an out-of-distribution split by the default score.

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


def detection_sentence(found: Sequence[DetectionResult]) -> str:
    """Return the detection results of the default score, in words."""
    if not found:
        return "OOD detection is unknown, because the run has no out-of-distribution split"
    score, texts = found[0].score, "; ".join(map(str, found))
    alarms = percent(FALSE_ALARM, "g")
    return f"OOD detection by the {score} score (the same for all posteriors), at {alarms} false alarms on val: {texts}"


def _scores(own: ScoredPredictive) -> str:
    accuracy = "" if own.accuracy is None else f", accuracy {percent(own.accuracy)}"
    return f"NLL {own.nll:.4f}{accuracy}" + ("" if own.ece is None else f", ECE {percent(own.ece)}")


def loses_accuracy(own: ScoredPredictive, baseline: ScoredPredictive) -> bool:
    """Return whether a predictive is significantly less accurate than the baseline, at 2.5%."""
    if own.is_right is None or baseline.is_right is None:
        return False
    found = accuracy_interval(own.is_right, baseline.is_right, groups=own.groups)
    return found is not None and found[1] < 0


def accuracy_interval(
    own: NDArray, other: NDArray, level: float = LEVEL, *, groups: RowGroups | None = None
) -> tuple[float, float] | None:
    """Return the central interval of the difference of two accuracies on the same examples.

    Tango (1998), eq. (4): all differences that the score test does not reject. Shares of right labels other than 0 and
    1, and rows in groups, get Hall's interval of the mean difference.

    Args:
        own, other: (N,), whether each example is right, or the share of its labels that are.
        groups: groups of dependent rows, or None.

    Returns:
        None if shares never differ, or without examples.
    """
    gaps = np.asarray(own, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if groups is not None or not np.isin(gaps, (-1.0, 0.0, 1.0)).all():
        return mean_interval(independent_values(gaps, groups), level)
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
