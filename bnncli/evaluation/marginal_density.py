"""Kernel density estimates of single parameters for figures, and the choice of parameters to show.

Silverman (1986), Density estimation for statistics and data analysis, eq. (3.31): Gaussian kernel of width 0.9 min(sd,
IQR / 1.34) S^(-1/5).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_WORK = 1 << 20  # kernel values at once


def density(draws: NDArray, grid: NDArray) -> NDArray[np.float64] | None:
    """Estimate the density of draws (S,) at grid values (G,); None if all draws are equal."""
    values = np.asarray(draws, dtype=np.float64)
    low, high = np.quantile(values, [0.25, 0.75])
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    width = 0.9 * (min(spread, (high - low) / 1.34) or spread) * len(values) ** -0.2
    if not width > 1e-12 * max(1.0, float(np.abs(values).max())):
        return None
    total = np.zeros(len(grid))
    for part in np.array_split(values, max(1, -(-len(values) * len(grid) // _WORK))):
        total += np.exp(-0.5 * ((grid[:, None] - part) / width) ** 2).sum(axis=1)
    return np.asarray(total / (len(values) * width * np.sqrt(2 * np.pi)))


def grid_of(parts: list[NDArray], size: int) -> NDArray[np.float64]:
    """Return a grid (size,) that covers nearly all mass of the densities of several sets of draws, (S,) each."""
    ends = [(part.mean() - 3.5 * part.std(), part.mean() + 3.5 * part.std()) for part in parts]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return np.linspace(low, high, size)


def apart(reference: NDArray, others: Mapping[str, NDArray]) -> NDArray[np.float64]:
    """Return the largest distance of a mean from the reference mean per parameter, (P,), in reference standard deviations.

    Args:
        reference, others: draws (S, P).
    """
    mean, sd = reference.mean(axis=0, dtype=np.float64), reference.std(axis=0, dtype=np.float64)
    scale = np.where(sd > 0, sd, np.inf)
    found = [np.abs(draws.mean(axis=0, dtype=np.float64) - mean) / scale for draws in others.values()]
    return np.max(found, axis=0) if found else np.zeros(len(mean))


def spread_over(sizes: NDArray, shares: tuple[float, ...]) -> list[int]:
    """Return distinct parameter indices at given quantiles of the sizes (P,), where 1 is the largest."""
    order = np.argsort(sizes, kind="stable")
    places = [round(share * (len(order) - 1)) for share in shares]
    return list(dict.fromkeys(int(order[place]) for place in places))
