"""Groups of draws that give a Monte Carlo error, and central intervals whose level holds for a further draw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bnncli.lazy import torch
from bnncli.numerics.running_sum import running_sum

if TYPE_CHECKING:
    from torch import Tensor


NUM_GROUPS = 10  # nine degrees of freedom: the error's own standard error is a quarter of it
NUM_SCRAMBLES = 8  # a power of two, so that a power of two of draws leaves each scramble a power of two as well
FEWEST_RUNS = 5  # fewest chains that stay whole: four would leave three degrees of freedom
MOST_BYTES = 64 << 20  # of the groups' probabilities in one file


@dataclass(frozen=True)
class DrawPartition:
    """A partition of S draws into G contiguous groups.

    Args:
        ends: (G,) ascending, the index behind each group's last draw; the last end is S.
        weights: (G,) float64 on the CPU, each group's share of the draws or of their weights; they sum to one.
    """

    ends: tuple[int, ...]
    weights: Tensor

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def of(cls, ends: Sequence[int], weights: Tensor | None = None) -> DrawPartition:
        """Return the groups with these ends, of draws with weights (S,) that sum to one; None for equal ones."""
        cuts = (0, *ends)
        sizes = torch.tensor([end - begin for begin, end in pairwise(cuts)], dtype=torch.float64)
        if weights is None:
            return cls(tuple(ends), sizes / sizes.sum())
        parts = weights.double().cpu().split([int(size) for size in sizes])
        return cls(tuple(ends), torch.stack([part.sum() for part in parts]))

    def parts(self, some: slice) -> Iterator[tuple[int, slice]]:
        """Yield each group that a slice of draws meets, with its part of the slice, counted from the slice's start."""
        begin = 0
        for group, end in enumerate(self.ends):
            first, last = max(begin, some.start), min(end, some.stop)
            if first < last:
                yield group, slice(first - some.start, last - some.start)
            begin = end


def group_ends(num_draws: int, *, most: int = NUM_GROUPS, starts: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ends of nearly equal groups of S draws; one draw makes one group.

    Args:
        num_draws: S.
        most: largest number of groups.
        starts: draws where an independent run (a chain) begins; with at least FEWEST_RUNS of them, groups are cut only
            there.
    """
    if len(starts) >= FEWEST_RUNS:
        count = min(most, len(starts))
        return (*(starts[group * len(starts) // count] for group in range(1, count)), num_draws)
    count = min(most, num_draws)
    return tuple(group * num_draws // count for group in range(1, count + 1))


def scramble_ends(num_draws: int) -> tuple[int, ...]:
    """Return the ends of the scrambles that S Sobol points are drawn in: eight, fewer below 16 draws.

    More scrambles cost some evenness. 256 points, ResNet-20's head with a full covariance, left a root mean square
    error of a probability of 0.00027 with draws of theta (one scramble 0.00025, plain draws 0.00116), of 0.00016 with
    draws of the logits (0.00005, 0.00103).
    """
    return group_ends(num_draws, most=max(1, min(NUM_SCRAMBLES, num_draws // 2)))


def num_group_mean_rows(num_examples: int, num_classes: int, num_groups: int) -> int:
    """Return R of kept_rows."""
    return min(num_examples, max(1, MOST_BYTES // (4 * num_groups * num_classes)))


def group_mean_rows(num_examples: int, num_classes: int, num_groups: int) -> Tensor:
    """Return the rows (R,) int64, ascending, whose group means are kept: all, or as many evenly spaced ones as fit."""
    num_kept = num_group_mean_rows(num_examples, num_classes, num_groups)
    return torch.arange(num_kept) * num_examples // max(1, num_kept)


LEVEL = 0.95  # with enough draws


def effective_draws(num_draws: int, weights: Tensor | None = None) -> float:
    """Return the effective number of S draws with weights (S,), of positive sum; S for equal weights (None)."""
    if weights is None:
        return float(num_draws)
    wide = weights.double().cpu()
    return float(wide.sum() ** 2 / wide.square().sum())


def interval_level(num_draws: int, weights: Tensor | None = None) -> float | None:
    """Return the level of `central_interval` of S draws: 0.95, or (S - 1) / (S + 1) where less; None with a single draw."""
    if num_draws < 2:
        return None
    size = effective_draws(num_draws, weights)
    return min(LEVEL, (size - 1) / (size + 1))


def tail_shares(num_draws: int, weights: Tensor | None = None) -> tuple[float, float]:
    """Return the shares of the draws at the ends of the interval, where each draw stands for the middle of its own share."""
    size = effective_draws(num_draws, weights)
    tail = 0.5 - min(LEVEL, (size - 1) / (size + 1)) / 2
    below = (tail * (size + 1) - 0.5) / size  # a place p (S + 1), counted in shares
    return below, 1 - below


def central_interval(draws: Tensor, weights: Tensor | None = None, tails: tuple[float, float] | None = None) -> Tensor:
    """Return the ends (n, 2) of the central interval of each row's draws (n, S), of level `interval_level`.

    Args:
        draws: (n, S).
        weights: (S,) of the draws, positive sum; None for equal ones.
        tails: of `tail_shares`, where they are known already.
    """
    shares = tails or tail_shares(draws.shape[1], weights)
    if weights is not None:
        return _weighted_quantiles(draws, weights, shares)
    ordered = _sort(draws)
    return torch.stack([_at(ordered, share) for share in shares], dim=1)


def _at(ordered: Tensor, share: float) -> Tensor:
    """Return values (n,) at a share of ordered draws (n, S), each of which stands for the middle of its own share."""
    last = ordered.shape[1] - 1
    place = min(max(share * ordered.shape[1] - 0.5, 0.0), last)
    below = math.floor(place)
    return torch.lerp(ordered[:, below], ordered[:, min(below + 1, last)], place - below)


def _sort(draws: Tensor) -> Tensor:
    """Sort the draws (n, S) of each row; NumPy on a CPU, 30 times as fast as PyTorch there."""
    if draws.device.type == "cpu":
        return torch.from_numpy(np.sort(draws.numpy(), axis=1))
    return draws.sort(dim=1).values


def _weighted_quantiles(draws: Tensor, weights: Tensor, shares_at: Sequence[float]) -> Tensor:
    """Return values (n, 2) at shares of the draws (n, S) with weights (S,)."""
    tails = torch.stack([torch.full_like(draws[:, 0], share, dtype=torch.float64) for share in shares_at], dim=1)
    ordered, order = draws.sort(dim=1)
    shares = (weights.double() / weights.sum())[order]
    places = (running_sum(shares) - 0.5 * shares).contiguous()
    above = torch.searchsorted(places, tails)
    above = above.clamp(min(1, draws.shape[1] - 1), draws.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    left, right = places.gather(1, below), places.gather(1, above)
    # Between two equal places, both of weight zero, any point will do.
    step = ((tails - left) / (right - left).clamp_min(torch.finfo(torch.float64).tiny)).clamp(0, 1)
    return torch.lerp(ordered.gather(1, below), ordered.gather(1, above), step.to(draws.dtype))
