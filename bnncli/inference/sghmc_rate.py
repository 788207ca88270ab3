"""What stochastic-gradient chains take from their target: a learning rate that its stiffness allows, RMSprop's start; and how soon they forget.

Near a Gaussian of curvature h a chain moves by theta' = (1 - eta h) theta + (1 - a) v, v' = -eta h theta + (1 - a) v, plus noise (see
sghmc.py): it forgets where it was as fast as the powers of this matrix fall, by its spectral radius a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.inference.sghmc import SghmcPlan, inflation, preconditioner
from bnncli.inference.stiffness import curvature_passes, largest_curvature, mean_square
from bnncli.inference.white_coordinates import WhiteCoordinates
from bnncli.lazy import torch
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

ALLOWED = 0.05  # by which the length of steps may make the variance too large, where no learning rate is given
_FORGOTTEN = math.log(10)  # of draws that are told to be apart a tenth of their deviation is still shared

PlanAt = Callable[[float], SghmcPlan]  # of a learning rate, the first of each cycle


@dataclass(frozen=True)
class Planned:
    """How chains move on a target.

    Args:
        plan: with its learning rate.
        square: (P,), what RMSprop starts from, where it preconditions.
        stiffness: the largest curvature of -log joint under G, of the places that were looked at.
        excess: by what the variance along the stiffest direction is too large: by the length of steps, and by minibatches at most.
        passes: gradient passes over the data that all that took.
    """

    plan: SghmcPlan
    square: Tensor | None
    stiffness: float
    excess: tuple[float, float]
    passes: float


def planned(
    target: CurvedTarget,
    plan_at: PlanAt,
    *,
    places: Sequence[Tensor],
    learning_rate: float | None,
    whitening: WhiteCoordinates | None,
    squares: torch.Generator,
    generator: torch.Generator,
) -> Planned:
    """How chains move on a target, at the learning rate given, or at the largest that its stiffness allows.

    Args:
        target: the log posterior, with all data.
        places: theta (P,) each, on the target's device: where chains start, and where they go if that is known. The stiffest counts:
            a network that is sure of its labels has little curvature where chains start, and more where they go.
        learning_rate: for the mean loss, the first of each cycle; None chooses one.
        whitening: of the coordinates that chains move in.
        squares: of the minibatches that RMSprop starts from. generator: of the search for the largest curvature.
    """
    any_rate = plan_at(1.0)  # all but the rate is known
    passes, square = len(places) * curvature_passes(target), None
    if any_rate.is_preconditioned:
        batch_size = _squared_batch(any_rate.batch_size, target.num_examples)
        square, more = mean_square(target, places[0], batch_size, squares)
        passes += more
    scale = None if square is None else preconditioner(square)
    stiffness = max(largest_curvature(target, place, generator, scale, whitening=whitening) for place in places)
    rate = learning_rate
    if rate is None:
        rate = _bearable_reach(any_rate, target.num_examples, is_whitened=whitening is not None)
        rate *= target.num_examples / stiffness
    plan = plan_at(rate)
    excess = inflation(plan, stiffness, target.num_examples, _share(plan, plan.num_exploring) * rate)
    return Planned(plan, square, stiffness, excess, passes)


def num_apart(plan: SghmcPlan, curvature: float, num_examples: int) -> tuple[int, int]:
    """How many of the draws that a cycle keeps are nearly independent, one at least, and of how many cycles in turn those of one are.

    Two draws are where the direction that forgets most slowly has a tenth left of where it was.

    Args:
        curvature: the smallest of -log joint under G, or less.
    """
    num_batches = -(-num_examples // plan.batch_size)
    found = []
    for epoch in range(plan.cycle_length):
        rate = plan.learning_rate * _share(plan, epoch + 0.5)
        found.append(num_batches * _forgetting(plan.momentum_decay, rate / num_examples * curvature))
    total, spacing = 0.0, plan.cycle_length
    for back, one in enumerate(reversed(found), start=1):
        total += one
        if total >= _FORGOTTEN:
            spacing = back
            break
    whole = sum(found)
    in_turn = 1 if whole >= _FORGOTTEN else plan.num_cycles if whole == 0 else math.ceil(_FORGOTTEN / whole)
    return max(1, plan.num_draws * plan.spacing // spacing), min(in_turn, plan.num_cycles)


def _forgetting(decay: float, reach: float) -> float:
    """By how many e-foldings a step forgets: minus the logarithm of the spectral radius; 0 where it does not."""
    trace, determinant = 2 - decay - reach, 1 - decay
    inside = trace**2 - 4 * determinant
    radius = math.sqrt(determinant) if inside < 0 else 0.5 * (abs(trace) + math.sqrt(inside))
    return math.inf if radius == 0 else max(0.0, -math.log(radius))


def _bearable_reach(plan: SghmcPlan, num_examples: int, *, is_whitened: bool) -> float:
    """The learning rate of each cycle's start where none is given, in stiffest directions: eta times their curvature."""
    decay, last, num_batches = plan.momentum_decay, _share(plan, plan.num_exploring), num_examples / plan.batch_size
    reach = ALLOWED / (1 + ALLOWED) * 2 * (2 - decay) / last
    if not is_whitened:
        return min(reach, 2 - decay)  # no more than half of what is stable, while exploring
    if num_batches > 1 and plan.temperature > 0:  # all directions are the stiffest, with its noise of minibatches
        reach = min(reach, ALLOWED * 2 * decay * plan.temperature / (num_batches - 1) / last)
    return min(reach, 0.25 * (2 - decay))  # they stiffen far from the base


def _squared_batch(batch_size: int, num_examples: int) -> int:
    """Examples of the batches that RMSprop starts from: a whole split has no gradient at its mode."""
    return min(batch_size, max(1, num_examples // 32))


def _share(plan: SghmcPlan, epoch: float) -> float:
    """The learning rate at an epoch of a cycle, of that at its start."""
    return 0.5 * (1 + math.cos(math.pi * epoch / plan.cycle_length)) if plan.is_cyclical else 1.0
