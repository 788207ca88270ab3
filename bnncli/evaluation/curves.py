"""Curves of a split's predictions, thinned to what a plot can show: reliability, risk against coverage, ROC.

Risk and coverage (Geifman and El-Yaniv 2017, arXiv 1705.08500): the share `risk` of errors among the share `coverage`
of most confident predictions. ROC as in detection: in-distribution examples are the positives and have higher scores.
Examples of equal confidence form one point of a curve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.calibration import NUM_BINS, Reliability, label_reliability, reliability
from bnncli.evaluation.example_statistics import ExampleStatistics
from bnncli.lazy import special

MAX_POINTS = 200  # per curve: a quarter of the width of a figure in pixels
_DIGITS = 6

Curve = dict[str, list[Any]]


def reliability_of(probs: NDArray, examples: ExampleStatistics, *, num_bins: int = NUM_BINS) -> Curve | None:
    """Return the reliability curve, for multi-label predictions that of all decisions; None without labels or examples.

    Args:
        probs: (N, C), from which `examples` was computed; may be memory-mapped.
    """
    if len(examples) == 0:
        return None
    if examples.is_right is not None:
        return reliability_curve(examples, num_bins=num_bins)
    own = examples.of_labels
    if own is None or own.labels is None:
        return None
    return curve_of_bins(label_reliability(probs, own.labels, num_bins=num_bins))


def reliability_curve(examples: ExampleStatistics, *, num_bins: int = NUM_BINS) -> Curve:
    """Return edges (B + 1,), count, confidence and accuracy (B,) of equal-width bins; None in empty bins.

    Args:
        examples: labelled.
    """
    return curve_of_bins(reliability(examples, num_bins=num_bins))


def curve_of_bins(bins: Reliability) -> Curve:
    """Return bins in the form of reliability_curve."""
    means = {"confidence": bins.confidence, "accuracy": bins.accuracy}
    shown: Curve = {"edges": bins.edges.tolist(), "count": bins.count.tolist()}
    return shown | {name: [None if np.isnan(v) else float(v) for v in values] for name, values in means.items()}


def frequency_interval(share: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a frequency (Clopper and Pearson 1934), with coverage of at least `level`.

    Args:
        share: share of `count` independent examples for which the event happened.
    """
    happened, tail = round(share * count), (1 - level) / 2
    low = float(special.betaincinv(happened, count - happened + 1, tail)) if happened else 0.0
    high = float(special.betaincinv(happened + 1, count - happened, 1 - tail)) if happened < count else 1.0
    return low, high


def risk_coverage_curve(confidence: NDArray, is_right: NDArray) -> Curve:
    """Return coverage, ascending to 1, and risk at each distinct confidence (N,), N >= 1; at most MAX_POINTS points."""
    order = np.argsort(-confidence, kind="stable")
    last = np.append(np.diff(confidence[order]) != 0, True)
    count = np.arange(1, len(order) + 1)[last]
    wrong = np.cumsum(~is_right[order].astype(bool))[last]
    return thinned({"coverage": count / len(order), "risk": wrong / count})


def roc_curve(scores_in: NDArray, scores_out: NDArray, most: int | None = None) -> Curve:
    """Return fpr and tpr, ascending from 0 to 1, over thresholds on non-empty scores (N,) and (M,); at most `most` points."""
    scores = np.concatenate([scores_in, scores_out])
    is_in = np.arange(len(scores)) < len(scores_in)
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    accepted_in, accepted_out = (np.append(0, np.cumsum(side[order])[last]) for side in (is_in, ~is_in))
    return thinned({"fpr": accepted_out / len(scores_out), "tpr": accepted_in / len(scores_in)}, most)


def thinned(curve: dict[str, NDArray], most: int | None = None) -> Curve:
    """Thin a curve to at most `most` points (MAX_POINTS by default), evenly spaced along it, keeping both ends."""
    most = MAX_POINTS if most is None else most
    points = np.stack(list(curve.values()), axis=1)
    if len(points) > most:
        way = np.append(0, np.cumsum(np.abs(np.diff(points, axis=0)).sum(axis=1)))
        wanted = np.linspace(0, way[-1], most)
        places = np.unique(np.append(np.searchsorted(way, wanted[:-1]), len(points) - 1))
        points = points[places]
    return {name: np.round(points[:, column], _DIGITS).tolist() for column, name in enumerate(curve)}
