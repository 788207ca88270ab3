"""Layers of a flow that learn: minibatches or all data, several draws a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError
from bnncli.inference.objective import Objective
from bnncli.inference.target_learner import TargetLearner
from bnncli.lazy import torch
from bnncli.training.adam import Adam

if TYPE_CHECKING:
    from torch import Tensor


class StepSizes(NamedTuple):
    """Of a step: examples (N or more: all data), theta drawn, and Adam's learning rate at first."""

    batch_size: int
    num_draws: int
    learning_rate: float


class FlowLearner(TargetLearner):
    """Layers that maximise an objective.

    Args:
        objective: to maximise.
        layers: nn.Modules on the target's device.
        sizes: of a step.
        generator: of the shuffles and the draws, on the device that the layers are on or on the CPU.

    Attributes:
        elbo: mean estimate of each epoch, less the base's entropy, nats.
    """

    def __init__(
        self, objective: Objective, layers: Sequence[Any], sizes: StepSizes, generator: torch.Generator
    ) -> None:
        self.layers, self.sizes = layers, sizes
        self.estimate = objective.estimate
        self.elbo: list[float] = []
        optimizer = Adam([[part for layer in layers for part in layer.parameters()]], objective.target.device)
        super().__init__(objective.target, optimizer, generator, batch_size=sizes.batch_size, num_draws=sizes.num_draws)

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

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Standard normal draws (steps, S, P)."""
        return (self.normal(num_steps, self.sizes.num_draws, self.target.layout.num_params),)

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
