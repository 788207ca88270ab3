"""Trajectories on a GPU of which a part of a step, with its gradient, is one captured graph: no Python runs between its kernels.

Chains, momenta and the part's factors lie in tensors that stay where they are; each trajectory writes its own into them and
replays the graph. A part rounds as it does in `trajectory`: the same kernels on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from bnncli.inference.dynamics import State, StepFactors, WhitenedPotential, integrate, parts
from bnncli.lazy import torch
from bnncli.training.step_graph import StepGraph

if TYPE_CHECKING:
    from torch import Tensor


class _Phase:
    """Chains and momenta that move where they are; knows nothing of the graph, so that both go when they are let go.

    Args:
        potential: that they move in.
        state, momentum: of their shapes and precisions.
        is_split: which dynamics.
    """

    def __init__(self, potential: WhitenedPotential, state: State, momentum: Tensor, *, is_split: bool) -> None:
        self.potential, self.is_split = potential, is_split
        self.state, self.momentum = State(*(torch.empty_like(part) for part in state)), torch.empty_like(momentum)
        self.numbers = torch.zeros(len(StepFactors._fields), dtype=torch.float64, device=momentum.device).unbind()
        self._written: tuple[float | Tensor, ...] = (0.0,) * len(self.numbers)
        self.count = torch.zeros((), dtype=torch.int64, device=momentum.device)

    def write(self, state: State, momentum: Tensor) -> None:
        """Where a trajectory starts."""
        for own, given in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(given)

    def set(self, factors: StepFactors) -> None:
        """How the next part goes: numbers that are others than before reach the device with their kernels, without a wait."""
        for place, number, old in zip(self.numbers, factors, self._written, strict=True):
            if number != old:
                place.fill_(number)
        self._written = tuple(factors)

    def step(self) -> None:
        """One part of an integrator step, which is counted."""
        state, momentum = integrate(
            self.potential, self.state, self.momentum, StepFactors(*self.numbers), is_split=self.is_split
        )
        for own, new in zip((*self.state, self.momentum), (*state, momentum), strict=True):
            own.copy_(new)
        self.count += 1

    def num_done(self) -> int:
        """Steps counted on the device."""
        return int(self.count)


class GraphMover:
    """Makes trajectories as `trajectory` does; what it returns, its next call overwrites.

    Args:
        potential: whose target is resident on its GPU.
        dynamics: split or leapfrog.
        warn: told once where the step cannot be captured.
    """

    has_energy: ClassVar[bool] = False

    def __init__(self, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]) -> None:
        self.potential, self.dynamics, self.warn = potential, dynamics, warn
        self._moving: tuple[_Phase, StepGraph[None]] | None = None

    @classmethod
    def where_possible(
        cls, potential: WhitenedPotential, dynamics: str, *, warn: Callable[[str], None]
    ) -> GraphMover | None:
        """One for these trajectories; None on a CPU, and where data travel to the GPU block by block."""
        target = potential.target
        return cls(potential, dynamics, warn=warn) if target.device.type == "cuda" and target.is_resident else None

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients.

        Raises:
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        if self._moving is None:
            phase = _Phase(self.potential, state, momentum, is_split=self.dynamics == "split")
            self._moving = phase, StepGraph(phase.step, phase.num_done, momentum.device, warn=self.warn)
        phase, step = self._moving
        phase.write(state, momentum)
        for factors in parts(num_steps, step_size, dynamics=self.dynamics):
            phase.set(factors)
            step()
        return phase.state, phase.momentum
