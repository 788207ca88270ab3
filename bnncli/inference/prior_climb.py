"""The prior precision that suits a posterior of another kind than the Gaussian for which one was chosen.

The precision that predicts best depends on how far the posterior is from a Gaussian: on 397 digits draws of the Gaussian want
6, those of hmc .6 (val NLL .275 against .222). So the precision of the Gaussian is where to start, and neighbours are tried in
turn, by a short fit each that goes on from the last. Importance weights between neighbours would save little: a change of the log
precision by d has log weights with a standard deviation of about d sqrt(P / 2), 9 at half a decade of 125 parameters.

A neighbour has to be better by more than chance, or by more than a hundredth where that is more (first_near_the_best): where
nothing tells them apart, the precision stays, and posteriors of one run keep one target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncli.errors import NumericError
from bnncli.inference.structure_choice import first_near_the_best
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

STEP = math.log(10) / 2  # of the log precision
_LONGEST = (
    2 * STEP
)  # after a step that succeeds: towards stronger priors, whose trials are cheap, or where it gained much
_MUCH = 0.25  # of the NLL
_SHOWN = 8  # trials that progress counts to
_BOUNDS = (math.log(1e-4), math.log(1e6))


@dataclass(frozen=True)
class PriorTrial:
    """A short fit under one prior precision.

    Args:
        precision: of the weights.
        losses: (M,), of the validation examples, nats.
        cost: of it, in the unit of PriorClimb's limit.
        limit: the cost that all trials may have while this is the best one.
        found: what the next trial goes on from.
    """

    precision: float
    losses: Tensor
    cost: float
    limit: float
    found: Any = None

    @property
    def nll(self) -> float:
        """Mean loss, nats an example."""
        return float(self.losses.mean())


@dataclass(frozen=True)
class PriorClimb:
    """The best, and all that was tried, from the first on, without what it left; is_cut: the limit of the cost ended it."""

    best: PriorTrial
    trials: list[PriorTrial]
    is_cut: bool

    @property
    def curve(self) -> list[list[float]]:
        """Precision and mean loss of all trials, in increasing order of precision."""
        return sorted([one.precision, one.nll] for one in self.trials)


def climb_prior(
    try_at: Callable[[float, PriorTrial | None], PriorTrial], first: float, *, progress: Progress = SILENT
) -> PriorClimb:
    """Climb from the precision `first` to larger and to smaller ones, as long as each predicts better than the last.

    Args:
        try_at: the trial under a precision, which may go on from another; a NumericError says that there is none.
        progress: advanced once a trial.

    Raises:
        NumericError: the first trial cannot be made.
    """
    task = progress.task("prior precision", _SHOWN)
    best = try_at(first, None)
    trials, is_cut = [replace(best, found=None)], False
    for sign in (1, -1):  # a stronger prior's trial takes less time
        step = STEP
        while not is_cut:
            task.advance(int(len(trials) < _SHOWN), note=f"{best.precision:.3g}")
            log_precision = math.log(best.precision) + sign * step
            if not _BOUNDS[0] <= log_precision <= _BOUNDS[1]:
                break
            is_cut = sum(trial.cost for trial in trials) >= best.limit
            if is_cut:
                break
            found = _tried(try_at, math.exp(log_precision), best)
            if found is not None:
                trials.append(replace(found, found=None))
            if found is not None and first_near_the_best({"best": best.losses, "next": found.losses}) == "next":
                gained_much = found.nll < (1 - _MUCH) * best.nll
                best, step = found, _LONGEST if sign > 0 or gained_much else STEP
            elif step > STEP:
                step = STEP
            else:
                break
        if best.precision > first:
            break
    return PriorClimb(best, trials, is_cut)


def _tried(
    try_at: Callable[[float, PriorTrial | None], PriorTrial], precision: float, before: PriorTrial
) -> PriorTrial | None:
    """The trial, or None where it cannot be made, or its losses are not finite."""
    try:
        found = try_at(precision, before)
    except NumericError:
        return None
    return found if math.isfinite(found.nll) else None
