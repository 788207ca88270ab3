"""How long a training goes on and how fast it learns: epochs in rounds, a schedule, an early end at a standstill.

When the objective stands still the rest of the schedule is shortened, so that the learning rate still falls to zero. A round
is some whole epochs; it is what a resume state goes back to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

STANDSTILL_ERRORS = 1.5  # standard errors that the objective must have risen by to be rising
RISING_ERRORS = 3.0  # the same for a last part that is to be told still rising, which is seldom to be said of noise
STEP_SHARES = (0.5, 0.75)  # of the planned steps: where He et al. (2016, arXiv:1512.03385, 4.2) divide the rate by ten
ANNEALING_SHARE = 0.15  # of the steps so far: how long the learning rate falls after a standstill


@dataclass
class Course:
    """The course of one training, as planned and as it became.

    Args:
        epochs: passes over the data, at most.
        num_batches: steps an epoch.
        schedule: of the learning rates: constant, falling to zero along a cosine, or a tenth (step) from half of the steps on and
            a hundredth from three quarters on.
        num_cycles: cosines one after the other, each of as many epochs, with the first rate at its start.
        patience: rounds compared with as many before to tell a standstill; 0 never ends early.
        round_steps: that a round takes at least, in whole epochs.

    Attributes:
        num_epochs: epochs that there will be: fewer than planned after a standstill.
        annealing_start: the step at which the shortened end began; None while there is none.
    """

    epochs: int
    num_batches: int
    schedule: str = "cosine"
    patience: int = 0
    round_steps: int = 1
    num_cycles: int = 1
    num_epochs: int = field(init=False)
    annealing_start: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_epochs = self.epochs

    @property
    def is_early(self) -> bool:
        """Whether the objective stood still."""
        return self.annealing_start is not None

    @property
    def epochs_a_round(self) -> int:
        """Whole epochs of at least `round_steps` steps."""
        return -(-self.round_steps // self.num_batches)

    def rate(self, first: float, step: int) -> float:
        """The learning rate of a step, for one that is `first` at the start.

        Along a cosine to zero at the planned end; after a standstill along a shorter one from where it was.
        """
        if self.schedule == "constant":
            return first
        start, end = self.annealing_start, self.num_epochs * self.num_batches
        if self.schedule == "step":
            return first * 0.1 ** sum(step >= share * end for share in STEP_SHARES)
        if start is None:
            length = end / self.num_cycles
            return first * _cosine(step % length / length)
        planned_end = self.epochs * self.num_batches
        return first * _cosine(start / planned_end) * _cosine((step - start) / (end - start))

    def look(self, objective: Sequence[float]) -> None:
        """Begin the shortened end where the objective of the epochs so far, which is to rise, stands still."""
        if not self.is_early and self._stands_still(objective):
            self._shorten(len(objective))

    def _stands_still(self, objective: Sequence[float]) -> bool:
        """Whether the last `patience` rounds have a mean no higher than as many rounds before, beyond the noise."""
        width = self.patience * self.epochs_a_round
        if len(objective) < 2 * width:
            return False
        return not _rises(objective, width, STANDSTILL_ERRORS)

    def doubt(self, objective: Sequence[float]) -> str | None:
        """Why the objective of all epochs, which is to rise, may not be at its end, in words; None where nothing speaks for it.

        It was still rising where its last quarter is above the quarter before beyond the noise; with patience, and epochs enough
        for that, it is to have been seen to stand still as well.
        """
        width = len(objective) // 4
        if self.is_early:
            return None
        if width > 1 and _rises(objective, width, RISING_ERRORS):
            return "was still rising"
        # Where the plan is too short for patience the last quarter decides, if there are epochs enough to tell anything.
        is_asked = 2 * self.patience * self.epochs_a_round <= self.epochs or width < 2
        is_doubted = self.patience > 0 and is_asked and not self._stands_still(objective)
        return "had not levelled off" if is_doubted else None

    def _shorten(self, done: int) -> None:
        """Let the learning rate fall to zero over a few more epochs, no more than were planned."""
        more = max(self.epochs_a_round, math.ceil(ANNEALING_SHARE * done))
        if done + more < self.num_epochs:
            self.annealing_start = done * self.num_batches
            self.num_epochs = done + more

    def state(self) -> dict[str, Tensor]:
        """What became of it, as tensors of a resume state."""
        start = -1 if self.annealing_start is None else self.annealing_start
        return {"history.ends": torch.tensor([self.num_epochs, start])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state; one that says nothing is of a training that goes on as planned."""
        if "history.ends" in state:
            self.num_epochs, start = (int(value) for value in state["history.ends"])
            self.annealing_start = None if start < 0 else start


def _cosine(share: float) -> float:
    """1 at 0, 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _rises(objective: Sequence[float], width: int, errors: float) -> bool:
    """Whether the mean of the last `width` epochs is more than so many standard errors above that of as many before."""
    values = torch.tensor(objective[len(objective) - 2 * width :], dtype=torch.float64)
    before, after = values[:width], values[width:]
    # Single epochs do not tell their noise: they are compared as they are.
    error = math.sqrt(float(before.var() + after.var()) / width) if width > 1 else 0.0
    return float(after.mean() - before.mean()) > errors * error
