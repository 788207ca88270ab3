"""What everything that learns from a target's minibatches, or from all its data, has in common (see bnncli.training.learner)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.targets.target import LogJoint, Target
from bnncli.training.adam import Adam
from bnncli.training.learner import num_batches
from bnncli.training.steps import steps_at_once

if TYPE_CHECKING:
    from torch import Tensor

_MAX_FULL_CHUNK = 32  # steps on all data whose draws are laid out at once


class TargetLearner:
    """The batches of a target.

    Args:
        target: the log posterior, with all data.
        optimizer: what holds the parameters.
        generator: of the shuffles and the draws, on the device that the parameters are on or on the CPU.
        batch_size: examples a step; the target's number or more takes all data.
        num_draws: theta whose gradients are taken in a step.
    """

    shuffles = True
    draws_in_steps = False
    seen_shape: tuple[int, ...] = ()
    constants: object = None

    def __init__(
        self, target: Target, optimizer: Adam, generator: torch.Generator, *, batch_size: int, num_draws: int
    ) -> None:
        self.target, self.optimizer, self.generator = target, optimizer, generator
        self.batch_size = batch_size if batch_size < target.num_examples else None
        step_bytes = target.dtype.itemsize * num_draws * target.layout.num_params
        if self.batch_size is not None:
            none = target.examples(torch.empty(0, dtype=torch.int64, device=target.device))
            one = sum(part.shape[1:].numel() * part.dtype.itemsize for part in none)
            step_bytes = max(step_bytes, self.batch_size * one)
        most = _MAX_FULL_CHUNK if self.batch_size is None else num_batches(self)  # type: ignore[arg-type]
        self.steps_at_once = steps_at_once(step_bytes, target.device, most=most)
        # A graph needs its data where they are: those that travel block by block cannot be captured.
        self.is_capturable = target.is_capturable and (self.batch_size is not None or target.is_resident)
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    @property
    def num_examples(self) -> int:
        """Of the target."""
        return self.target.num_examples

    def note(self) -> str:
        """Nothing: the bar says it all."""
        return ""

    def begin_epoch(self, order: Tensor | None) -> None:
        """Batches are cut from this order."""
        assert order is not None
        self._order = order.to(self.device)

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """The target's examples, each (steps, B, ...)."""
        return tuple(part.unflatten(0, (num_steps, -1)) for part in self.target.examples(self._order[rows]))

    def normal(self, num_steps: int, *shape: int) -> Tensor:
        """Standard normal draws (steps, ...) in the products' precision, on the device."""
        generator = self.generator
        noise = torch.randn((num_steps, *shape), generator=generator, device=generator.device, dtype=self.target.dtype)
        return noise.to(self.device)

    def joint(self, *examples: Tensor) -> LogJoint:
        """The target as a step's batch tells it; all of it without one."""
        return self.target.minibatch(*examples) if examples else self.target
