"""Where the chains of a run are, and their next transition: a warm-up that settles them and finds the step size, then draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from bnncli.inference.dynamics import MAX_STEPS, TURN, Mover, State, Transition, WhitenedPotential, transition
from bnncli.inference.pivot import mean_of_chains
from bnncli.inference.step_size import StepSizeAdaptation, adaptation_statistic
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# The first part of the warm-up only brings the chains from their over-dispersed starts to where the posterior is.
SETTLING_SHARE = 0.4
SETTLING_STEPS = 16
SHORT = 0.1  # posterior standard deviations: steps by which chains move where the Gaussian explains little, and turns about nothing better


class SamplerSettings(NamedTuple):
    """How a run warms up and moves; first_step: the step size that it tries first."""

    num_warmup: int
    target_accept: float
    dynamics: str
    first_step: float = TURN / 4

    @property
    def num_settling(self) -> int:
        """Transitions that bring the chains to where the posterior is."""
        return math.ceil(SETTLING_SHARE * self.num_warmup)

    def new_adaptation(self) -> StepSizeAdaptation:
        """The search for the step size, before the first transition that counts for it."""
        return StepSizeAdaptation.start(initial=self.first_step, target_accept=self.target_accept)


class Walk(NamedTuple):
    """Where all chains are, and what the warm-up has found: all that the next transition needs but the generator.

    Args:
        state: of all chains.
        adaptation: of the step size.
        smoothed: (C,), each chain's recent acceptance rate in the warm-up.
        num_done: transitions made, warm-up included.
        num_gradients: evaluations in all of them, of each chain; None where it goes on from a state that did not count them.
    """

    state: State
    adaptation: StepSizeAdaptation
    smoothed: Tensor
    num_done: int
    num_gradients: int | None = 0

    @classmethod
    def start(cls, potential: WhitenedPotential, settings: SamplerSettings, z: Tensor) -> Walk:
        """Chains at z (C, P), before the first transition."""
        smoothed = torch.full(z.shape[:1], settings.target_accept, dtype=torch.float64, device=z.device)
        return cls(potential.state(z), settings.new_adaptation(), smoothed, 0)

    def more_gradients(self, count: int) -> int | None:
        """The evaluations after so many more."""
        return None if self.num_gradients is None else self.num_gradients + count

    def to_tensors(self) -> dict[str, Tensor]:
        """All of it, to be stored."""
        return {
            **self.state._asdict(),
            "adaptation": self.adaptation.to_tensor(),
            "smoothed": self.smoothed,
            "num_done": torch.tensor(self.num_done),
            "num_gradients": torch.tensor(-1 if self.num_gradients is None else self.num_gradients),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> Walk:
        """The inverse of to_tensors."""
        return cls(
            State(*(tensors[name].to(device) for name in State._fields)),
            StepSizeAdaptation.from_tensor(tensors["adaptation"]),
            tensors["smoothed"].to(device),
            int(tensors["num_done"]),
            _counted(tensors.get("num_gradients")),
        )


def _counted(stored: Tensor | None) -> int | None:
    """The evaluations that a state has; None where it has none."""
    return None if stored is None or int(stored) < 0 else int(stored)


def advance(
    potential: WhitenedPotential,
    walk: Walk,
    settings: SamplerSettings,
    *,
    generator: torch.Generator,
    mover: Mover | None = None,
) -> tuple[Walk, Transition]:
    """One transition of all chains, of the warm-up as long as that lasts; mover as for `transition`."""
    if walk.num_done >= settings.num_warmup:
        step_size = walk.adaptation.final
        result = transition(potential, walk.state, generator, step_size, settings.dynamics, mover=mover)
        made = walk.more_gradients(result.num_steps)
        return walk._replace(state=result.state, num_done=walk.num_done + 1, num_gradients=made), result
    adaptation = walk.adaptation
    if walk.num_done == settings.num_settling:
        # The steps that freed stuck chains say nothing about the steps to sample with.
        adaptation = settings.new_adaptation()
        if potential.pivot is not None and walk.adaptation.current > SHORT:
            potential.pivot.copy_(mean_of_chains(walk.state.z, walk.state.gradient))
    is_settling = walk.num_done < settings.num_settling
    max_steps = SETTLING_STEPS if is_settling else MAX_STEPS
    result = transition(
        potential, walk.state, generator, adaptation.current, settings.dynamics,
        max_steps=max_steps, is_settling=is_settling, mover=mover,
    )  # fmt: skip
    smoothed = 0.7 * walk.smoothed + 0.3 * result.acceptance
    if result.is_falling is not None:
        smoothed = torch.where(result.is_falling, walk.smoothed, smoothed)
    found = adaptation_statistic(smoothed, result.acceptance, settings.target_accept, result.is_falling)
    if found is not None:
        adaptation = adaptation.update(found)
    made = walk.more_gradients(result.num_steps)
    return Walk(result.state, adaptation, smoothed, walk.num_done + 1, made), result
