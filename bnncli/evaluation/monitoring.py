"""Sequential tests that are valid at any time: whether a stream of examples still looks like the calibration split.

Each test is a product of bets on the next observation that starts at 1 and, without a change, is a nonnegative
supermartingale. By Ville's inequality it ever reaches 1 / alpha with probability at most alpha, however often it is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.decisions import covering_rank
from bnncli.lazy import special

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
        self._sorted = np.sort(_require_finite(scores))

    def extend(self, scores: NDArray, uniforms: NDArray) -> Floats:
        """Return the p-values of the next scores (T,), in order, given a uniform number for each, (T,)."""
        found = np.empty(len(scores))
        for start in range(0, len(scores), _BLOCK):
            block = _require_finite(scores[start : start + _BLOCK])
            is_later = np.tri(len(block), dtype=bool)  # row t has the examples up to t, itself included
            below = ((block < block[:, None]) & is_later).sum(axis=1) + np.searchsorted(self._sorted, block)
            upto = ((block <= block[:, None]) & is_later).sum(axis=1) + np.searchsorted(self._sorted, block, "right")
            size = len(self._sorted) + 1 + np.arange(len(block))
            found[start : start + len(block)] = (below + uniforms[start : start + len(block)] * (upto - below)) / size
            self._sorted = np.sort(np.concatenate([self._sorted, block]), kind="stable")
        return found


_BLOCK = 512  # examples compared with each other at once


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
        return Capital(np.log(np.maximum(shares, 1e-300)) + log_scale[..., None, None]), log_capital


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


RATE = 0.005  # by which one example moves the error level of adaptive sets
LARGEST_STEP = 0.1  # by which one batch moves it


def adapt_level(level: float, target: float, is_missed: NDArray) -> tuple[float, float]:
    """Return the next error level of adaptive conformal inference, and the weight of this batch.

    All sets of a batch (n,) have the same level; the next level is lower if more than `target` of them missed their
    class. A level of at most 0 gives sets of all classes, one of at least 1 empty sets. The mean of the batches' error
    rates with these weights therefore differs from `target` by at most (1 + LARGEST_STEP) / (RATE sum of weights), for
    any stream (Gibbs and Candes 2021, proposition 4.1, with batches as steps).
    """
    weight = min(float(len(is_missed)), LARGEST_STEP / RATE)
    return level + RATE * weight * (target - float(np.mean(is_missed))), weight


def threshold_at_level(scores: NDArray, level: float) -> float:
    """Return the conformal threshold for scores (n,) in [0, 1] at an error level: 2 lets all classes in, -1 none."""
    if level >= 1:
        return -1.0
    rank = covering_rank(len(scores), 1 - level) if level > 0 else None
    return 2.0 if rank is None else float(np.sort(scores)[rank - 1])
