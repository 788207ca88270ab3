"""Data for figures of chains: means over blocks of draws and rank histograms."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

BAND = 0.99  # probability that a bar of a rank histogram is within its band


def block_means(draws: NDArray, num_blocks: int) -> tuple[list[float], NDArray[np.float64]]:
    """Return the midpoints (from 1) of at most num_blocks blocks of draws (C, T) and each chain's means in them (C, B)."""
    edges = np.linspace(0, draws.shape[1], min(num_blocks, draws.shape[1]) + 1).round().astype(int)
    sums = np.add.reduceat(draws.astype(np.float64), edges[:-1], axis=1)
    return ((edges[:-1] + 1 + edges[1:]) / 2).tolist(), sums / np.diff(edges)


def rank_counts(draws: NDArray, num_bins: int) -> NDArray[np.int64]:
    """Count how many draws (C, T) of each chain fall into each of num_bins equal parts of the pooled ranks, (C, B).

    Ties, which a chain that rejects moves repeats, share their mean rank.
    """
    flat = draws.ravel()
    _, where, size = np.unique(flat, return_inverse=True, return_counts=True)
    rank = (np.cumsum(size) - (size + 1) / 2)[where.ravel()].reshape(draws.shape)
    place = np.minimum((rank / len(flat) * num_bins).astype(int), num_bins - 1)
    return np.stack([np.bincount(chain, minlength=num_bins) for chain in place])


def rank_band(num_draws: int, num_bins: int) -> tuple[float, float]:
    """Return the binomial bounds within which a bar of a chain of independent draws stays with probability BAND."""
    share, tail = 1 / num_bins, (1 - BAND) / 2
    low = next(k for k in range(num_draws + 1) if special.bdtr(k, num_draws, share) >= tail)
    high = next(k for k in range(num_draws, -1, -1) if k == 0 or special.bdtrc(k - 1, num_draws, share) >= tail)
    return float(low), float(high)


def histogram(values: NDArray, num_bins: int, *, least: float | None = None) -> tuple[list[float], list[int]]:
    """Return edges (B + 1,) and counts (B,) of finite values (M,), starting at `least` if given."""
    low = float(values.min()) if least is None else least
    high = float(values.max())
    high = high if high > low else low + max(abs(low), 1.0) * 1e-3
    counts, edges = np.histogram(values, bins=num_bins, range=(low, math.nextafter(high, math.inf)))
    return edges.tolist(), counts.tolist()
