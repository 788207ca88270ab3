"""Fewer draws in the place of many: what a file stores of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bnncli.integrators import Ready
from bnncli.integrators._partitions import DrawPartition
from bnncli.integrators.importance import WeightedMc
from bnncli.integrators.logit_mc import DrawnLogitMc
from bnncli.integrators.mc import DrawnMc
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def thinned(ready: Ready, most: int, generator: torch.Generator) -> Ready:
    """The same with at most so many of its draws: one at random from each of as many stretches of equal length.

    Draws at a fixed distance could be all of one repeat or chain. Weights are scaled to sum to one again. Draws of the
    logits become the same for all examples.
    """
    if isinstance(ready, DrawnLogitMc):
        ready = replace(ready, is_shared=not ready.is_of_theta)
    count = ready.num_draws
    if count is None or count <= most:
        return ready
    shifts = torch.rand(most, generator=generator, dtype=torch.float64)
    chosen = ((torch.arange(most) + shifts) * count / most).long().clamp_max(count - 1)
    if isinstance(ready, WeightedMc):
        return replace(ready, drawn=_of_draws(ready.drawn, chosen))
    if isinstance(ready, DrawnMc):
        return _of_draws(ready, chosen)
    if isinstance(ready, DrawnLogitMc):
        return replace(ready, noise=_taken(ready.noise, chosen), groups=DrawPartition.of([most]))
    return ready


def _of_draws(drawn: DrawnMc, chosen: Tensor) -> DrawnMc:
    changed: dict[str, Any] = {"theta": _taken(drawn.theta, chosen), "groups": DrawPartition.of([len(chosen)])}
    if drawn.weights is not None:
        weights = _taken(drawn.weights, chosen)
        changed["weights"] = weights / weights.sum()
    return replace(drawn, **changed)


def _taken(tensor: Tensor, chosen: Tensor) -> Tensor:
    return tensor[chosen.to(tensor.device)]
