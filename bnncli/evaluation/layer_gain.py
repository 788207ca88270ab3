"""The gain of a posterior over other layers compared with one over the last layer, on the same labelled examples.

p-value and interval refer to the mean paired difference of losses, by Hall's t, which corrects for skewness (Hall 1992,
JRSS B 54, eq. 2.6), and for losses that the sample may lack (see excess.py). They hold for these two predictives,
including their draws. Several posteriors: Holm. A difference that is not significant does not make the last layer as
good; that requires an interval that excludes a gain of more than 1% of its NLL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.excess import WORSE_SHARE, Relabelled, worse_p_value
from bnncli.evaluation.paired import holm, skewed_interval, skewness_of
from bnncli.lazy import special

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
    losses: Mapping[str, NDArray[np.float64]], counterparts: Mapping[str, tuple[str, NDArray[np.float64]]]
) -> list[LayerGain]:
    """Return the gains of posteriors over other layers.

    Args:
        losses: posterior name to losses (N,), nats, all of the same examples.
        counterparts: posterior name to name and losses of the last-layer posterior it is compared with, which must be
            chosen without looking at its losses.
    """
    gaps = {name: own - counterparts[name][1] for name, own in losses.items()}
    found = []
    drawn = {name: Relabelled.of(own, counterparts[name][1]) for name, own in losses.items()}
    p_values = [_two_sided(own, counterparts[name][1], drawn[name]) for name, own in losses.items()]
    for (name, gap), p in zip(gaps.items(), holm(p_values), strict=True):
        other, theirs = counterparts[name]
        low, high = loss_interval(losses[name], theirs, drawn=drawn[name]) or (None, None)
        margin = WORSE_SHARE * float(theirs.mean())
        found.append(LayerGain(name, other, float(gap.mean()), low, high, p, margin, len(gaps)))
    return found


def _two_sided(losses: NDArray, others: NDArray, drawn: Relabelled) -> float | None:
    sides = [worse_p_value(losses, others, drawn), worse_p_value(others, losses, drawn.opposite())]
    known = [side for side in sides if side is not None]
    return min(1.0, 2 * min(known)) if known else None


def loss_interval(
    losses: NDArray, others: NDArray, level: float = LEVEL, *, drawn: Relabelled | None = None
) -> tuple[float, float] | None:
    """Return the central interval of the mean of losses (N,) minus others (N,), nats; None if they have no variance.

    Hall's interval, widened by how far the mean strays under labels drawn so that neither is better.

    Args:
        drawn: the draws for both, if already computed.
    """
    differences = np.asarray(losses) - np.asarray(others)
    found = mean_interval(differences, level)
    if found is None:
        return None
    drawn = drawn or Relabelled.of(losses, others)
    above, below = np.quantile(drawn.sums, [(1 + level) / 2, (1 - level) / 2]) / len(differences)
    value = float(np.mean(differences))
    return min(found[0], value - float(above)), max(found[1], value - float(below))


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
    return skewed_interval(float(values.mean()), error, skewness_of(values), size, reach)
