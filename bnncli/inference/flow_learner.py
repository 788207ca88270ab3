"""Layers of a flow that learn: minibatches or all data, several draws a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnncli.errors import NumericError
from bnncli.inference.objective import Objective
from bnncli.training.adam import Adam
from bnncli.training.learner import num_batches
from bnncli.training.steps import steps_at_once

_MAX_FULL_CHUNK = 32  # steps on all data whose draws are laid out at once


class StepSizes(NamedTuple):
    """Of a step: examples (N or more: all data), theta drawn, and Adam's learning rate at first."""

    batch_size: int
    num_draws: int
    learning_rate: float


class FlowLearner:
    """Layers that maximise an objective.

    Args:
        objective: to maximise.
        layers: nn.Modules on the target's device.
        sizes: of a step.
        generator: of the shuffles and the draws, on the device that the layers are on or on the CPU.

    Attributes:
        elbo: mean estimate of each epoch, less the base's entropy, nats.
    """

    shuffles = True
    draws_in_steps = False
    seen_shape: tuple[int, ...] = ()
    constants = None

    def __init__(
        self, objective: Objective, layers: Sequence[Any], sizes: StepSizes, generator: torch.Generator
    ) -> None:
        self.layers, self.sizes, self.generator = layers, sizes, generator
        self.estimate = objective.estimate
        self.target = target = objective.target
        self.elbo: list[float] = []
        self.batch_size = sizes.batch_size if sizes.batch_size < target.num_examples else None
        self.optimizer = Adam([[part for layer in layers for part in layer.parameters()]], target.device)
        step_bytes = target.dtype.itemsize * sizes.num_draws * target.layout.num_params
        if self.batch_size is not None:
            none = target.examples(torch.empty(0, dtype=torch.int64, device=target.device))
            one = sum(part.shape[1:].numel() * part.dtype.itemsize for part in none)
            step_bytes = max(step_bytes, self.batch_size * one)
        most = _MAX_FULL_CHUNK if self.batch_size is None else num_batches(self)
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

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.elbo)

    @property
    def objective(self) -> Sequence[float]:
        """The ELBO of each."""
        return self.elbo

    def rates(self, epoch: int) -> Sequence[float]:
        """One for all layers."""
        return (self.sizes.learning_rate,)

    def note(self) -> str:
        """Nothing: the bar says it all."""
        return ""

    def begin_epoch(self, order: Tensor | None) -> None:
        """Batches are cut from this order."""
        assert order is not None
        self._order = order.to(self.device)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Standard normal draws (steps, S, P)."""
        shape, generator = (self.sizes.num_draws, self.target.layout.num_params), self.generator
        noise = torch.randn((num_steps, *shape), generator=generator, device=generator.device, dtype=self.target.dtype)
        return (noise.to(self.device),)

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """The target's examples, each (steps, B, ...)."""
        return tuple(part.unflatten(0, (num_steps, -1)) for part in self.target.examples(self._order[rows]))

    def update(self, *parts: Tensor) -> Tensor:
        """The estimate of the ELBO before one update of the layers, float64."""
        estimate = self.estimate(self.layers, *parts).mean()
        self.optimizer.zero_grad()
        estimate.neg().backward()
        self.optimizer.step()
        return estimate.detach().double()

    def end_round(self, seen: Tensor) -> None:
        """The ELBO of each epoch is the mean of its steps'."""
        values, first = seen.mean(dim=1), self.num_epochs
        self.elbo += values.tolist()
        bad = torch.isfinite(values).logical_not().nonzero()
        if len(bad):
            raise NumericError(
                f"the ELBO is not finite in epoch {first + int(bad[0]) + 1}",
                hint=f"use a \0learning_rate\0 below {self.sizes.learning_rate:g}",
            )

    def state(self) -> dict[str, Tensor]:
        """The history."""
        return {"history.elbo": torch.tensor(self.elbo, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a history."""
        self.elbo = state["history.elbo"].tolist()
