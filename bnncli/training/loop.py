"""The loop of every training: rounds of epochs, states to save and to continue from, an end when it is time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from bnncli.errors import Interrupted
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress, Task
from bnncli.training.course import Course
from bnncli.training.learner import Learner
from bnncli.training.optimizer import load_optimizer, optimizer_tensors
from bnncli.training.steps import Rates, Steps

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Tensor]"
Save = Callable[[State, bool], None]


def train(
    learner: Learner,
    course: Course,
    *,
    what: str,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> None:
    """Trains a learner in place.

    Args:
        learner: what learns.
        course: how long and how fast; tells afterwards whether it ended early.
        what: the name of the task.
        state: from an earlier call that was interrupted; the result is that of an uninterrupted one, bit for bit.
        save: called with the state after every round, and with True when the training is interrupted.
        progress: advanced once a step.

    Raises:
        NumericError: when an epoch's objective is not finite.
    """
    training = _Training(learner, course, Steps(learner, warn=progress.warn))
    if state is not None:
        training.load(state)
    task = progress.task(what, course.epochs * course.num_batches)
    task.advance(learner.num_epochs * course.num_batches)
    kept: State = {} if save is None else training.state()
    try:
        while learner.num_epochs < course.num_epochs:
            training.run_round(task)
            if save is not None:
                kept = training.state()
                save(kept, False)
    except Interrupted:
        if save is not None:
            save(kept, True)
        raise
    learner.optimizer.zero_grad()  # gradients lie in the memory of the graph, which is to go


def step_rates(learner: Learner, course: Course, epoch: int) -> list[Rates]:
    """The learning rates of every step of an epoch."""
    first = epoch * course.num_batches
    groups = learner.rates(epoch)
    return [tuple(course.rate(rate, first + step) for rate in groups) for step in range(course.num_batches)]


class _Training:
    """A learner, its course and its steps: all that a state holds."""

    def __init__(self, learner: Learner, course: Course, steps: Steps) -> None:
        self.learner, self.course, self.steps = learner, course, steps

    def run_round(self, task: Task) -> None:
        """Some epochs, then a look whether the objective still rises."""
        learner, course = self.learner, self.course
        first = learner.num_epochs
        last = min(first + course.epochs_a_round, course.num_epochs)
        rates = [step_rates(learner, course, epoch) for epoch in range(first, last)]
        if learner.batch_size is None:  # an epoch is one step: draws are laid out for all of the round
            seen = self.steps.run([step for (step,) in rates], task, learner.note()).unsqueeze(1)
        else:
            seen = torch.stack([self.steps.run(epoch, task, learner.note()) for epoch in rates])
        learner.end_round(seen)
        if course.patience:
            course.look(learner.objective)

    def state(self) -> dict[str, Tensor]:
        """Copies of everything, on the device."""
        learner = self.learner
        own = {"generator": learner.generator.get_state(), **self.course.state(), **learner.state()}
        return own | optimizer_tensors(learner.optimizer)

    def load(self, state: State) -> None:
        """Take up a state."""
        self.learner.generator.set_state(state["generator"].cpu())
        self.course.load(state)
        self.learner.load(state)
        load_optimizer(self.learner.optimizer, state)
