"""Sequential tests that are valid at any time: whether a stream of examples still looks like the calibration split.

Each test is a product of bets on the next observation that starts at 1 and, without a change, is a nonnegative
supermartingale. By Ville's inequality it ever reaches 1 / alpha with probability at most alpha, however often it is looked at.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

JUMP_RATES = (1e-4, 1e-3, 1e-2, 1e-1)  # share of a bet's capital that moves to the others at each step
SLOPES = (-2.0, -1.0, 0.0, 1.0, 2.0)  # of the linear bets on a p-value
POWERS = (0.25, 0.5, 0.75)  # exponents of the power bets on a p-value, which win on p-values near 0
STAKES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # shares of the capital that a loss of 0 costs


class ConformalRanks:
    """Compute smoothed conformal p-values in which every example joins the comparison set of the next.

    With a fixed comparison set, p-values are dependent: an unusual calibration split would raise an alarm in the long
    run. Online, they are independent and uniform for exchangeable examples, whatever the size of the calibration split
    (Vovk, Gammerman and Shafer 2005).

    Args:
        scores: calibration scores and those of the stream so far; lower ones are more unusual.
    """

    def __init__(self, scores: NDArray) -> None:
        self._sorted: list[float] = np.sort(_require_finite(scores)).tolist()

    def extend(self, scores: NDArray, uniforms: NDArray) -> Floats:
        """Return the p-values of the next scores (T,), in order, given a uniform number for each, (T,)."""
        found = np.empty(len(scores))
        pairs = zip(_require_finite(scores).tolist(), np.asarray(uniforms).tolist(), strict=True)
        for place, (score, uniform) in enumerate(pairs):
            below = bisect.bisect_left(self._sorted, score)
            upto = bisect.bisect_right(self._sorted, score)
            self._sorted.insert(upto, score)
            found[place] = (below + uniform * (upto - below + 1)) / len(self._sorted)
        return found


def _require_finite(values: NDArray) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if not np.isfinite(found).all():
        raise ValueError("expected finite numbers")
    return found


def bet_on_p_values(p_values: NDArray) -> Floats:
    """Return what each bet on uniform p-values (..., T) pays per unit, (..., T, B). Its mean under uniformity is 1."""
    p = np.asarray(p_values, dtype=np.float64)[..., None]
    slopes, powers = np.array(SLOPES), np.array(POWERS)
    # a p-value of 0 has probability 0, but a uniform number in [0, 1) can be 0
    return np.concatenate([1 + slopes * (p - 0.5), powers * np.maximum(p, 1e-300) ** (powers - 1)], axis=-1)


def bet_on_losses(losses: NDArray, reference: float) -> Floats:
    """Return what each bet on losses (..., T) in [0, 1] pays per unit, (..., T, B).

    Its mean is at most 1 while the mean loss given the past is at most `reference` (Waudby-Smith and Ramdas 2024).
    """
    if not 0 < reference < 1:
        raise ValueError(f"expected a reference between 0 and 1; got {reference:g}")
    x = np.asarray(losses, dtype=np.float64)[..., None]
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError("expected losses between 0 and 1")
    return 1 + np.array(STAKES) / reference * (x - reference)


def upper_rate(num_wrong: int, n: int, level: float) -> float:
    """Return the Clopper-Pearson bound that the error rate exceeds with probability at most `level`.

    A test against it at level alpha raises a false alarm with probability at most alpha + level.
    """
    return float(special.betaincinv(num_wrong + 1, n - num_wrong, 1 - level)) if num_wrong < n else 1.0


@dataclass(frozen=True)
class Capital:
    """Capital of a gambler who spreads it over bets and jump rates.

    At each step a share of the capital in each bet moves to all bets alike, so that the best bet may change with
    time (the simple jumper of Vovk et al. 2021, averaged over jump rates).

    Args:
        log_shares: (..., J, B), log of the capital in each bet at each jump rate.
    """

    log_shares: Floats

    @staticmethod
    def start(num_bets: int, shape: tuple[int, ...] = ()) -> Capital:
        """Return a capital of 1 for each stream of `shape`."""
        size = len(JUMP_RATES) * num_bets
        return Capital(np.full((*shape, len(JUMP_RATES), num_bets), -math.log(size)))

    def play(self, factors: NDArray) -> tuple[Capital, Floats]:
        """Return the capital after factors (..., T, B) and the log capital after each step, (..., T)."""
        jumps = np.array(JUMP_RATES)[:, None]
        scale = self.log_shares.max(axis=(-2, -1), keepdims=True)
        shares = np.exp(self.log_shares - scale)
        log_scale = scale[..., 0, 0]
        log_capital = np.empty(factors.shape[:-1])
        for step in range(factors.shape[-2]):
            moved = (1 - jumps) * shares + jumps * shares.mean(axis=-1, keepdims=True)
            shares = moved * factors[..., step, None, :]
            total = shares.sum(axis=(-2, -1))
            log_scale = log_scale + np.log(total)
            shares = shares / total[..., None, None]
            log_capital[..., step] = log_scale
        with np.errstate(divide="ignore"):
            return Capital(np.log(shares) + log_scale[..., None, None]), log_capital


@dataclass(frozen=True)
class Alarm:
    """An alarm of one stream.

    Args:
        step: number of examples at which the capital first reached 1 / alpha.
        change: estimated number of examples before the change: where the capital was lowest before the alarm.
    """

    step: int
    change: int


def find_alarm(log_capital: NDArray, alpha: float) -> Alarm | None:
    """Return the alarm of a stream with these log capitals (T,) from its first example on; None if there is none."""
    crossed = np.flatnonzero(log_capital >= -math.log(alpha))
    if len(crossed) == 0:
        return None
    path = np.concatenate([[0.0], log_capital[: crossed[0] + 1]])
    return Alarm(int(crossed[0]) + 1, int(len(path) - 1 - np.argmin(path[::-1])))


def adapt_levels(p_values: NDArray, target: float, rate: float, start: float | None = None) -> Floats:
    """Return the error levels of adaptive conformal inference before each example and after the last, (T + 1,).

    An example's set lacks its class if the class's conformal p-value is at most the level. The share of such examples
    differs from `target` by at most (max(start, 1 - start) + rate) / (rate T), for any stream (Gibbs and Candes 2021,
    proposition 4.1). A level of at most 0 gives all classes, one of at least 1 none.

    Args:
        p_values: (T,), conformal p-values of the true classes, above 0 and at most 1.
    """
    levels = np.empty(len(p_values) + 1)
    levels[0] = target if start is None else start
    for step, p_value in enumerate(p_values):
        levels[step + 1] = levels[step] + rate * (target - (p_value <= levels[step]))
    return levels
