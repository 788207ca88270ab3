"""The training of flow layers: minibatches or all data, several draws a step, an early end, states to resume from.

Adam (Kingma and Ba 2015, arXiv:1412.6980) with a cosine schedule. When the ELBO stands still the rest of the schedule is
shortened, so that the learning rate still falls to zero. Work is done in rounds of whole epochs, at least 25 steps each;
a round is what a resume state goes back to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bnncli.errors import Interrupted, NumericError
from bnncli.inference._steps import StepRunner
from bnncli.inference.objective import Objective
from bnncli.progress import SILENT, Progress, Task
from bnncli.training.adam import adam_tensors, load_adam

State = Mapping[str, Tensor]
Save = Callable[[State, bool], None]

MIN_ROUND_STEPS = 25
STANDSTILL_ERRORS = 1.5  # standard errors that the ELBO must have risen by to be rising
ANNEALING_SHARE = 0.15  # of the steps so far: how long the learning rate falls after a standstill


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        epochs: passes over the data, at most.
        batch_size: examples a step; N or more takes all data at once.
        num_draws: theta drawn a step.
        learning_rate: of Adam at first.
        patience: rounds compared with as many before to tell a standstill; 0 never ends early.
    """

    epochs: int
    batch_size: int
    num_draws: int
    learning_rate: float
    patience: int


@dataclass
class History:
    """What a training went through.

    Args:
        elbo: mean estimate of each epoch, less the base's entropy, nats.
        num_epochs: epochs that there will be: fewer than planned after a standstill.
        annealing_start: the step at which the shortened end began; None while there is none.
    """

    num_epochs: int
    elbo: list[float] = field(default_factory=list)
    annealing_start: int | None = None

    @property
    def is_early(self) -> bool:
        """Whether the ELBO stood still."""
        return self.annealing_start is not None


def train(
    objective: Objective,
    layers: Sequence[Any],
    plan: Plan,
    *,
    generator: torch.Generator,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> History:
    """Trains layers in place.

    Args:
        objective: to maximise.
        layers: nn.Modules on the target's device.
        plan: how.
        generator: of the shuffles and the draws, on the device that the layers are on or on the CPU.
        state: from an earlier call that was interrupted; the result is that of an uninterrupted one, bit for bit.
        save: called with the state after every round, and with True when the training is interrupted.
        progress: advanced once a step.

    Raises:
        NumericError: when the ELBO of an epoch is not finite.
    """
    trainer = _Trainer(objective, layers, plan, generator, progress)
    if state is not None:
        trainer.load(state)
    kept = trainer.state()
    task = progress.task("refine", plan.epochs * trainer.num_batches)
    task.advance(len(trainer.history.elbo) * trainer.num_batches)
    try:
        while len(trainer.history.elbo) < trainer.history.num_epochs:
            trainer.run_round(task)
            kept = trainer.state()
            if save is not None:
                save(kept, False)
    except Interrupted:
        if save is not None:
            save(kept, True)
        raise
    trainer.optimizer.zero_grad()  # gradients lie in the memory of the graph, which is to go
    return trainer.history


class _Trainer:
    """Layers, optimizer, random state and history: all that a state holds."""

    def __init__(
        self, objective: Objective, layers: Sequence[Any], plan: Plan, generator: torch.Generator, progress: Progress
    ) -> None:
        self.layers, self.plan, self.generator = layers, plan, generator
        num_examples = objective.target.num_examples
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        device = objective.target.device
        self.optimizer = torch.optim.Adam(
            self.parameters,
            lr=torch.tensor(plan.learning_rate, device=device),
            fused=True,
            capturable=device.type == "cuda",
        )
        batch_size = min(plan.batch_size, num_examples)
        self.runner = StepRunner(objective, layers, self.optimizer, batch_size, plan.num_draws, warn=progress.warn)
        self.num_batches = self.runner.num_batches
        self.history = History(plan.epochs)

    def run_round(self, task: Task) -> None:
        """Some epochs, then a look whether the ELBO still rises."""
        first = len(self.history.elbo)
        count = min(self._epochs_a_round, self.history.num_epochs - first)
        if self.runner.is_full:
            values = self.runner.run(self._rates(first, count), self.generator, task)
        else:
            epochs = [self.runner.run(self._rates(first + i, 1), self.generator, task).mean() for i in range(count)]
            values = torch.stack(epochs)
        self.history.elbo += values.tolist()
        bad = torch.isfinite(values).logical_not().nonzero()
        if len(bad):
            raise NumericError(
                f"the ELBO is not finite in epoch {first + int(bad[0]) + 1}",
                hint=f"use a --learning-rate below {self.plan.learning_rate:g}",
            )
        if not self.history.is_early and self.plan.patience and self._stands_still():
            self._shorten()

    def _rates(self, epoch: int, count: int) -> list[float]:
        """The learning rate of every step of some epochs."""
        first = epoch * self.num_batches
        return [self._learning_rate(first + step) for step in range(count * self.num_batches)]

    @property
    def _epochs_a_round(self) -> int:
        return -(-MIN_ROUND_STEPS // self.num_batches)

    def _stands_still(self) -> bool:
        """Whether the last `patience` rounds have a mean ELBO no higher than as many rounds before, beyond the noise."""
        width = self.plan.patience * self._epochs_a_round
        if len(self.history.elbo) < 2 * width:
            return False
        values = torch.tensor(self.history.elbo[-2 * width :], dtype=torch.float64)
        before, after = values[:width], values[width:]
        # Single epochs do not tell their noise: they are compared as they are.
        error = math.sqrt(float(before.var() + after.var()) / width) if width > 1 else 0.0
        return float(after.mean() - before.mean()) <= STANDSTILL_ERRORS * error

    def _shorten(self) -> None:
        """Let the learning rate fall to zero over a few more epochs, no more than were planned."""
        done = len(self.history.elbo)
        more = max(self._epochs_a_round, math.ceil(ANNEALING_SHARE * done))
        if done + more < self.history.num_epochs:
            self.history.annealing_start = done * self.num_batches
            self.history.num_epochs = done + more

    def _learning_rate(self, step: int) -> float:
        """Along a cosine to zero at the planned end; after a standstill along a shorter one from where it was."""
        start, end = self.history.annealing_start, self.history.num_epochs * self.num_batches
        if start is None:
            return self.plan.learning_rate * _cosine(step / end)
        planned_end = self.plan.epochs * self.num_batches
        return self.plan.learning_rate * _cosine(start / planned_end) * _cosine((step - start) / (end - start))

    def state(self) -> dict[str, Tensor]:
        """Copies of everything, on the device."""
        history = self.history
        start = -1 if history.annealing_start is None else history.annealing_start
        tensors = {
            "generator": self.generator.get_state(),
            "history.elbo": torch.tensor(history.elbo, dtype=torch.float64),
            "history.ends": torch.tensor([history.num_epochs, start]),
        }
        return tensors | adam_tensors(self.parameters, self.optimizer)

    def load(self, state: State) -> None:
        """Take up a state."""
        self.generator.set_state(state["generator"].cpu())
        num_epochs, start = (int(value) for value in state["history.ends"])
        self.history = History(num_epochs, state["history.elbo"].tolist(), None if start < 0 else start)
        load_adam(self.parameters, self.optimizer, state)


def _cosine(share: float) -> float:
    """1 at 0, 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
