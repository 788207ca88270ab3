"""Energy-BFMI: whether new momenta change the energy as much as the posterior spreads it.

Betancourt (2016), arXiv:1604.00695, eq. (3): E-BFMI = mean square of the energy's steps / variance of the energy, one
number a chain. Below 0.3 a chain crosses the tails so slowly that it may have missed them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOW_BFMI = 0.3  # the threshold that Stan warns at


def bfmi(energy: NDArray) -> NDArray[np.float64]:
    """E-BFMI (C,) of each chain from energies (C, T), nats; NaN for a chain whose energy never changes.

    Raises:
        ValueError: energies of another shape, or fewer than two a chain.
    """
    if energy.ndim != 2 or energy.shape[1] < 2:
        raise ValueError(f"energy: expected shape (C, T) with T at least 2, got {energy.shape}")
    values = energy.astype(np.float64)
    variance = values.var(axis=1, ddof=1)
    steps = np.square(np.diff(values, axis=1)).mean(axis=1)
    return np.divide(steps, variance, out=np.full(len(values), np.nan), where=variance > 0)


def lowest_bfmi(energy: NDArray) -> float:
    """The lowest E-BFMI of the chains with energies (C, T); 0 for a chain whose energy never changes: it explores nothing."""
    return float(np.nan_to_num(bfmi(energy), nan=0.0).min())
