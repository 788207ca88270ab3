"""Central intervals of draws, plain or weighted: each draw stands for the middle of its share of the probability.

For equal weights these are the quantiles of Hazen (definition 5 of Hyndman and Fan 1996), linear between the draws.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LEVEL = 0.95
_TAILS = (0.5 - LEVEL / 2, 0.5 + LEVEL / 2)


def central_interval(draws: Tensor, weights: Tensor | None = None) -> Tensor:
    """Ends (n, 2) of the central 95 % of the draws (n, S) of each row; with few draws, the smallest and the largest.

    Args:
        draws: (n, S).
        weights: (S,) of the draws, positive sum; None for equal ones.
    """
    if weights is not None:
        return _weighted(draws, weights)
    ordered = _sort(draws)
    return torch.stack([_at(ordered, tail) for tail in _TAILS], dim=1)


def _at(ordered: Tensor, share: float) -> Tensor:
    """Quantiles (n,) of ordered draws (n, S)."""
    last = ordered.shape[1] - 1
    place = min(max(share * ordered.shape[1] - 0.5, 0.0), last)
    below = math.floor(place)
    return torch.lerp(ordered[:, below], ordered[:, min(below + 1, last)], place - below)


def _sort(draws: Tensor) -> Tensor:
    """The draws (n, S) of each row in order; on a CPU by NumPy, 30 times as fast as PyTorch there."""
    if draws.device.type == "cpu":
        return torch.from_numpy(np.sort(draws.numpy(), axis=1))
    return draws.sort(dim=1).values


def _weighted(draws: Tensor, weights: Tensor) -> Tensor:
    """The same for weights (S,)."""
    tails = torch.stack([torch.full_like(draws[:, 0], tail, dtype=torch.float64) for tail in _TAILS], dim=1)
    ordered, order = draws.sort(dim=1)
    shares = (weights.double() / weights.sum())[order]
    places = (shares.cumsum(dim=1) - 0.5 * shares).contiguous()
    above = torch.searchsorted(places, tails)
    above = above.clamp(min(1, draws.shape[1] - 1), draws.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    left, right = places.gather(1, below), places.gather(1, above)
    # Between two places that are the same, both of weight zero, any point will do.
    step = ((tails - left) / (right - left).clamp_min(torch.finfo(torch.float64).tiny)).clamp(0, 1)
    return torch.lerp(ordered.gather(1, below), ordered.gather(1, above), step.to(draws.dtype))
