"""One step size for all chains, found while they warm up.

Dual averaging: Hoffman and Gelman (2014), arXiv:1111.4246, algorithm 5. What it averages: Hoffman, Radul and Sountsov
(2021), AISTATS 130.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from bnncli.inference.dynamics import LONGEST_TURN
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

STUCK_SHARE = 0.25


def adaptation_statistic(
    smoothed: Tensor, acceptance: Tensor, target_accept: float, is_falling: Tensor | None = None
) -> float | None:
    """What dual averaging compares with its goal: the mean acceptance, unless a chain is stuck; None while a chain falls.

    The mean hides one stuck chain behind the others. When the recent rate of a chain is below a quarter of the goal, it
    is the harmonic mean of the chains' recent rates, which one chain near zero pulls to zero (Hoffman, Radul and
    Sountsov use it throughout).

    Args:
        smoothed: (C,), each chain's recent acceptance rate.
        acceptance: (C,), of the last transition.
        target_accept: the goal.
        is_falling: (C,); what suits chains that fall is not what suits those that have landed.
    """
    harmonic = 1 / (1 / smoothed.clamp(min=1e-3)).mean()
    fallen = torch.zeros_like(harmonic) if is_falling is None else is_falling.any().to(harmonic)
    numbers = torch.stack([smoothed.min(), acceptance.mean(), harmonic, fallen])
    lowest, mean, harmonic_mean, has_fallen = numbers.tolist()  # one sync
    if has_fallen:
        return None
    return float(mean if lowest >= STUCK_SHARE * target_accept else harmonic_mean)


class StepSizeAdaptation(NamedTuple):
    """Dual averaging of one step size, algorithm 5 of Hoffman and Gelman, with their constants."""

    goal: float
    shrinkage_point: float
    largest: float
    num_updates: int
    error_sum: float
    log_current: float
    log_average: float

    @classmethod
    def start(cls, *, initial: float, target_accept: float) -> StepSizeAdaptation:
        """Before the first transition. The largest step is one that makes the longest trajectory in one."""
        largest = math.log(LONGEST_TURN)
        return cls(target_accept, math.log(10 * initial), largest, 0, 0.0, math.log(initial), math.log(initial))

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> StepSizeAdaptation:
        """The inverse of to_tensor."""
        goal, shrinkage_point, largest, num_updates, *rest = numbers.tolist()
        return cls(goal, shrinkage_point, largest, round(num_updates), *rest)

    def to_tensor(self) -> Tensor:
        """All of it, float64, to be stored."""
        return torch.tensor(self, dtype=torch.float64)

    @property
    def current(self) -> float:
        """The step size to try next."""
        return math.exp(self.log_current)

    @property
    def final(self) -> float:
        """The averaged step size, for sampling."""
        return math.exp(min(self.log_average, self.largest))

    def update(self, acceptance: float) -> StepSizeAdaptation:
        """After a transition with this mean acceptance over the chains."""
        count = self.num_updates + 1
        weight = 1 / (count + 10)
        error_sum = (1 - weight) * self.error_sum + weight * (self.goal - acceptance)
        log_current = min(self.shrinkage_point - math.sqrt(count) / 0.05 * error_sum, self.largest)
        decay = count**-0.75
        log_average = decay * log_current + (1 - decay) * self.log_average
        return self._replace(num_updates=count, error_sum=error_sum, log_current=log_current, log_average=log_average)
