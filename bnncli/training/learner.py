"""What a training asks of that which learns. It knows its data and its objective; epochs, graphs and states it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from bnncli.lazy import torch
from bnncli.training.optimizer import Optimizer

if TYPE_CHECKING:
    from torch import Tensor


class Learner(Protocol):
    """Parameters, and one update of them on a batch.

    Attributes:
        generator: of shuffles and draws. A capture that fails puts another in its place, in the same state.
        batch_size: examples a step; None where each step takes all data, which have no order then.
        shuffles: whether batches are drawn anew each epoch; else they are blocks of consecutive examples.
        steps_at_once: whose draws and batches are laid out together. With one, a step's are copied to where a graph looks.
        seen_shape: of what an update returns.
        draws_in_steps: whether an update draws from the generator.
        is_capturable: whether an update may be captured as a graph, where the device has graphs.
    """

    generator: torch.Generator
    batch_size: int | None
    shuffles: bool
    steps_at_once: int
    seen_shape: tuple[int, ...]
    draws_in_steps: bool
    is_capturable: bool

    @property
    def optimizer(self) -> Optimizer:
        """What updates the parameters."""

    @property
    def device(self) -> torch.device:
        """Of parameters and batches."""

    @property
    def num_examples(self) -> int:
        """N."""

    @property
    def num_epochs(self) -> int:
        """Epochs that end_round was told of, now or before the state that was taken up."""

    @property
    def objective(self) -> Sequence[float]:
        """What each of those epochs gave of that which is to rise."""

    @property
    def constants(self) -> object:
        """What an update reads besides parameters and batch: with another one a captured step is not the same."""

    def rates(self, epoch: int) -> Sequence[float]:
        """The learning rate of each group of the optimizer in an epoch, before any schedule."""

    def note(self) -> str:
        """A few words on where the training is, for people."""

    def begin_epoch(self, order: Tensor | None) -> None:
        """The order of the examples (N,) that batches are cut from; None for that of the data. Not where a step takes all."""

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Draws of so many steps, laid out on the device: the steps are the first axis of each."""

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """These rows of the order, as so many batches of one size, on the device: the batches are the first axis of each."""

    def update(self, *parts: Tensor) -> Tensor:
        """One update, from a step's draws and batch; what it saw, float64, of shape `seen_shape`, on the device."""

    def end_round(self, seen: Tensor) -> None:
        """Take note of what all steps of some epochs saw, (epochs, steps, *seen_shape).

        Raises:
            NumericError: when an epoch's objective is not finite.
        """

    def state(self) -> dict[str, Tensor]:
        """Copies of all that the optimizer does not know and a resumed training needs."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


def num_batches(learner: Learner) -> int:
    """Steps of an epoch."""
    return 1 if learner.batch_size is None else -(-learner.num_examples // learner.batch_size)
