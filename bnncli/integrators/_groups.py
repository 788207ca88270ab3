"""Groups of draws whose means are kept beside the mean of all, so that its Monte Carlo error can be told later.

The groups are contiguous and (nearly) independent of each other: any cut does for independent draws; chains stay whole
where there are enough of them and are cut into long stretches where not (batch means), so that autocorrelation stays
within groups; scrambled Sobol points are scrambled anew in each group (randomised replicates: Owen 1997).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

NUM_GROUPS = 10  # nine degrees of freedom: the error's own standard error is a quarter of it
NUM_SCRAMBLES = 8  # a power of two, so that as many draws leave each scramble a power of two as well
FEWEST_RUNS = 5  # chains from which they stay whole: four would leave three degrees of freedom
MOST_BYTES = 64 << 20  # of the groups' probabilities in one file


@dataclass(frozen=True)
class DrawPartition:
    """A partition of S draws into G contiguous groups.

    Args:
        ends: (G,) ascending, the draw behind each group's last; the last end is S.
        weights: (G,) float64 on the CPU, each group's share of the draws or of their weights; they sum to one.
    """

    ends: tuple[int, ...]
    weights: Tensor

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def of(cls, ends: Sequence[int], weights: Tensor | None = None) -> DrawPartition:
        """The groups with these ends, of draws with weights (S,) that sum to one; None for equal ones."""
        cuts = (0, *ends)
        sizes = torch.tensor([end - begin for begin, end in pairwise(cuts)], dtype=torch.float64)
        if weights is None:
            return cls(tuple(ends), sizes / sizes.sum())
        parts = weights.double().cpu().split([int(size) for size in sizes])
        return cls(tuple(ends), torch.stack([part.sum() for part in parts]))

    def parts(self, some: slice) -> Iterator[tuple[int, slice]]:
        """The groups that a slice of draws meets, each with the part of the slice, counted from its start, that it has."""
        begin = 0
        for group, end in enumerate(self.ends):
            first, last = max(begin, some.start), min(end, some.stop)
            if first < last:
                yield group, slice(first - some.start, last - some.start)
            begin = end


def group_ends(num_draws: int, *, most: int = NUM_GROUPS, starts: Sequence[int] = ()) -> tuple[int, ...]:
    """Ends of at most so many nearly equal groups of S draws; one draw makes one group.

    Args:
        num_draws: S.
        most: groups.
        starts: draws where a run begins that is independent of those before (a chain); cuts are at these alone where
            there are at least FEWEST_RUNS.
    """
    if len(starts) >= FEWEST_RUNS:
        count = min(most, len(starts))
        return (*(starts[group * len(starts) // count] for group in range(1, count)), num_draws)
    count = min(most, num_draws)
    return tuple(group * num_draws // count for group in range(1, count + 1))


def scramble_ends(num_draws: int) -> tuple[int, ...]:
    """Ends of the scrambles that S Sobol points are drawn in: eight, fewer below 16 draws.

    So many cost some evenness. 256 points, ResNet-20's head with a full covariance, left a root mean square error of a
    probability of 0.00027 with draws of theta (one scramble 0.00025, plain draws 0.00116), of 0.00016 with draws of the
    logits (0.00005, 0.00103).
    """
    return group_ends(num_draws, most=max(1, min(NUM_SCRAMBLES, num_draws // 2)))


def num_kept_rows(num_examples: int, num_classes: int, num_groups: int) -> int:
    """R of kept_rows."""
    return min(num_examples, max(1, MOST_BYTES // (4 * num_groups * num_classes)))


def kept_rows(num_examples: int, num_classes: int, num_groups: int) -> Tensor:
    """The rows (R,) int64, ascending, whose group means are kept: all of them, or as many evenly spaced ones as fit."""
    num_kept = num_kept_rows(num_examples, num_classes, num_groups)
    return torch.arange(num_kept) * num_examples // max(1, num_kept)
