"""Convergence of chains: the worst R-hat and the smallest effective sample sizes over all parameters.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), arXiv 1903.08008: rank-normalised split R-hat, bulk
ESS, and tail ESS at the 5 % and 95 % quantiles, as computed by arviz-stats. An average over parameters hides
the ones that do not mix, so the worst is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from arviz_stats.base import array_stats
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.progress import SILENT, Progress

GOOD_RHAT = 1.05  # above it the chains do not agree well enough to be quoted
STUCK_ACCEPTANCE = 0.05  # a chain that accepts less of its moves has not sampled anything
MIN_DRAWS = 4  # per chain: fewer cannot be split into halves that have a variance
_TAIL_QUANTILES = (0.05, 0.95)
_CHUNK_PARAMS = 64


@dataclass(frozen=True)
class Convergence:
    """The worst values over all parameters; None where undefined, with the reason.

    Args:
        r_hat: largest rank-normalised split R-hat; 1 when converged.
        worst_parameter: index into P of the largest R-hat, of the smallest bulk ESS where R-hat is undefined.
        ess_bulk: smallest effective number of draws for location.
        ess_tail: smallest effective number of draws for the 5 % and 95 % quantiles.
        undefined: why some value is None; None when all are defined.
    """

    r_hat: float | None
    worst_parameter: int | None
    ess_bulk: float | None
    ess_tail: float | None
    undefined: str | None = None


def convergence(draws: NDArray, *, progress: Progress = SILENT) -> Convergence:
    """The worst R-hat and smallest bulk and tail ESS over the last axis of draws.

    Any quantity with a chain and a draw axis can be judged: parameters, log probabilities of held-out labels.

    Args:
        draws: (C, T, P): C chains, T draws each.
        progress: advances once per parameter.

    Raises:
        DataError: draws of another shape, or not finite.
    """
    if draws.ndim != 3:
        raise DataError(f"draws: expected shape (C, T, P), got {draws.shape}")
    if not np.isfinite(draws).all():
        raise DataError("draws: expected finite values, got NaN or infinity")
    reason = _why_undefined(draws)
    if reason is not None:
        return Convergence(None, None, None, None, undefined=reason)
    num_chains, _, num_params = draws.shape
    r_hat, ess_bulk, ess_tail = np.empty((3, num_params))
    task = progress.task("convergence", num_params)
    for begin in range(0, num_params, _CHUNK_PARAMS):
        block = slice(begin, begin + _CHUNK_PARAMS)
        chunk = np.moveaxis(draws[:, :, block], 2, 0).astype(np.float64)
        r_hat[block] = array_stats.rhat(chunk, method="rank")
        ess_bulk[block] = array_stats.ess(chunk, method="bulk")
        ess_tail[block] = array_stats.ess(chunk, method="tail", prob=_TAIL_QUANTILES)
        task.advance(len(chunk))
    if num_chains == 1:
        worst, reason = int(np.argmin(ess_bulk)), "R-hat needs at least two chains, got 1"
        return Convergence(None, worst, float(ess_bulk.min()), float(ess_tail.min()), undefined=reason)
    worst = int(np.argmax(r_hat))
    return Convergence(float(r_hat[worst]), worst, float(ess_bulk.min()), float(ess_tail.min()))


def _why_undefined(draws: NDArray) -> str | None:
    """The reason why no value can be given, or None."""
    num_chains, num_draws, num_params = draws.shape
    if num_chains == 0 or num_params == 0:
        return f"no draws: shape {draws.shape}"
    if num_draws < MIN_DRAWS:
        return f"needs at least {MIN_DRAWS} draws per chain, got {num_draws}"
    half = num_draws // 2
    # R-hat divides by the variance within half-chains: zero in all of them leaves it undefined.
    moves = (np.ptp(draws[:, :half], axis=1) > 0) | (np.ptp(draws[:, -half:], axis=1) > 0)
    stuck = np.flatnonzero(~moves.any(axis=0))
    if stuck.size:
        return f"constant draws: parameter {stuck[0]} does not move within any half-chain ({stuck.size} such)"
    return None
