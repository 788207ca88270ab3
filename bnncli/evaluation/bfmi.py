"""Energy-BFMI: whether resampled momenta change the energy as much as the energy varies over the posterior.

Betancourt (2016), arXiv:1604.00695, eq. (3): E-BFMI = mean squared energy step / variance of the energy, per chain.
Below 0.3 a chain crosses the tails so slowly that it may have missed them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOW_BFMI = 0.3  # Stan's warning threshold


def bfmi(energy: NDArray) -> NDArray[np.float64]:
    """Return the E-BFMI (C,) of chains from their energies (C, T), nats; NaN for a chain whose energy is constant.

    Raises:
        ValueError: the energies have another shape or fewer than two draws per chain.
    """
    if energy.ndim != 2 or energy.shape[1] < 2:
        raise ValueError(f"energy: expected shape (C, T) with T at least 2, got {energy.shape}")
    values = energy.astype(np.float64)
    variance = values.var(axis=1, ddof=1)
    steps = np.square(np.diff(values, axis=1)).mean(axis=1)
    return np.divide(steps, variance, out=np.full(len(values), np.nan), where=variance > 0)


def lowest_bfmi(energy: NDArray) -> float:
    """Return the lowest E-BFMI of chains with energies (C, T); a chain of constant energy explores nothing and counts as 0."""
    return float(np.nan_to_num(bfmi(energy), nan=0.0).min())
