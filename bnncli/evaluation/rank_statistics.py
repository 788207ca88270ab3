"""Rank-normalised split R-hat and effective sample sizes of many quantities at once.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), arXiv:1903.08008, equations 3 to 15, with Geyer's initial
monotone sequence (1992, Statistical Science 7, 473) truncated as in arviz-stats: the same numbers, in batches. Only the
mean autocovariance over chains is needed, so one inverse transform serves all chains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_TAILS = (0.05, 0.95)


class RankStatistics(NamedTuple):
    """R-hat (NaN for a single chain), bulk and tail effective sample size, (M,) each."""

    r_hat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def rank_statistics(draws: Tensor) -> RankStatistics:
    """Return R-hat, bulk and tail ESS of M quantities.

    Args:
        draws: (M, C, T), T >= 4, finite, no quantity constant within all half-chains.
    """
    draws = draws.double()
    num_chains, num_draws = draws.shape[1:]
    halves = _halves(draws)
    ordered, order = halves.flatten(1).sort(dim=1)
    scores = _normal_scores(ordered, order).view_as(halves)
    r_hat = torch.full(draws.shape[:1], math.nan, dtype=torch.float64, device=draws.device)
    if num_chains > 1:
        middle = 0.5 * (ordered[:, (ordered.shape[1] - 1) // 2] + ordered[:, ordered.shape[1] // 2])
        folded = (halves - middle.view(-1, 1, 1)).abs().flatten(1).sort(dim=1)
        r_hat = torch.maximum(_r_hat(scores), _r_hat(_normal_scores(*folded).view_as(halves)))
    everything = ordered if num_draws % 2 == 0 else draws.flatten(1).sort(dim=1).values
    tails = [_ess(_halves((draws <= _quantile(everything, share).view(-1, 1, 1)).double())) for share in _TAILS]
    return RankStatistics(r_hat, _ess(scores), torch.minimum(*tails))


def _halves(draws: Tensor) -> Tensor:
    """Split each chain into two, (M, 2 C, T // 2), dropping an odd draw in the middle."""
    half = draws.shape[2] // 2
    return torch.cat([draws[:, :, :half], draws[:, :, -half:]], dim=1)


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Return normal quantiles of the ranks (M, n), mean ranks for ties, from a sort along dimension 1."""
    size = ordered.shape[1]
    place = torch.arange(size, device=ordered.device).expand_as(ordered)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(is_new, place, 0).cummax(dim=1).values
    is_last = torch.ones_like(is_new)
    is_last[:, :-1] = is_new[:, 1:]
    last = torch.where(is_last, place, size).flip(1).cummin(dim=1).values.flip(1)
    ranks = 0.5 * (first + last).double() + 1
    scores = torch.special.ndtri((ranks - 0.375) / (size + 0.25))
    return torch.empty_like(scores).scatter_(1, order, scores)


def _r_hat(chains: Tensor) -> Tensor:
    """Return the classic R-hat (M,) of chains (M, C, T)."""
    size = chains.shape[2]
    between = size * chains.mean(dim=2).var(dim=1)
    within = chains.var(dim=2).mean(dim=1)
    return torch.sqrt((between / within + size - 1) / size)


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Return the linearly interpolated quantile (M,) of ordered (M, n), rounded as in numpy."""
    position = (ordered.shape[1] - 1) * share
    below = math.floor(position)
    weight = position - below
    low, high = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    step = high - low
    return high - step * (1 - weight) if weight >= 0.5 else low + step * weight


def _ess(chains: Tensor) -> Tensor:
    """Return the effective sample size (M,) of chains (M, C, T); the number of draws for a constant quantity."""
    num_chains, size = chains.shape[1:]
    total = num_chains * size
    mean_covariance = _mean_autocovariance(chains)
    within = mean_covariance[:, 0] * size / (size - 1)
    variance = mean_covariance[:, 0].clone()
    if num_chains > 1:
        variance += chains.mean(dim=2).var(dim=1)
    correlation = 1 - (within.unsqueeze(1) - mean_covariance) / variance.unsqueeze(1)
    correlation[:, 0] = 1
    pairs = correlation[:, : size // 2 * 2].unflatten(1, (-1, 2)).sum(dim=2)
    # The sum ends before the first non-positive pair or at the end of the chain; one more even lag counts once.
    largest = max(0, math.ceil((size - 2) / 2) - 1)
    num_pairs = (pairs > 0).long().cumprod(dim=1).sum(dim=1).clamp(max=largest)
    counted = torch.arange(pairs.shape[1], device=pairs.device) < num_pairs.unsqueeze(1)
    time = -1 + 2 * torch.where(counted, pairs.cummin(dim=1).values, 0.0).sum(dim=1)
    end = num_pairs.unsqueeze(1)
    even, pair = correlation.gather(1, 2 * end).squeeze(1), pairs.gather(1, end).squeeze(1)
    time += torch.where((even > 0) | (pair >= 0), even, 0.0)
    ess = total / time.clamp(min=1 / math.log10(total))
    spread = chains.amax(dim=(1, 2)) - chains.amin(dim=(1, 2))
    return torch.where(spread < 1e-15, float(total), ess)


def _mean_autocovariance(chains: Tensor) -> Tensor:
    """Return the autocovariance at every lag (M, T), divided by T and averaged over the chains (M, C, T)."""
    size = chains.shape[2]
    length = 1 << (2 * size - 1).bit_length()
    spectrum = torch.fft.rfft(chains - chains.mean(dim=2, keepdim=True), n=length)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(dim=1)
    return torch.fft.irfft(power, n=length)[:, :size] / size
