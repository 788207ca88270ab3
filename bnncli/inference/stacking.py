"""Refit last layers in several ways, and find the mixture of them that predicts held-out rows best.

A network may have memorised the rows that it was trained on, which can help or harm a last layer that is refitted to them. Which rows to
fit is decided by validation rows: each way has its own prior precision, chosen by cross-validation over them, and the weights maximise
the log score of the mixture there.

Yao, Vehtari, Simpson and Gelman (2018), Using Stacking to Average Bayesian Predictive Distributions, Bayesian Analysis 13(3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.inference.mode import Mode, find_mode
from bnncli.lazy import torch
from bnncli.progress import Task
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor

_DECADES = (5, 4, 3, 2, 1, 0, -1, -2)  # of precisions, strongest first: each mode starts from the one before
_FALLS = 2  # the walk ends where the score has fallen so often in a row
# Tolerances of modes that are compared and of the chosen ones, in posterior standard deviations of all parameters together.
_ROUGH, _CLOSE = 0.3, 0.02
_GAP = 1e-6  # nats a row between the weights found and the best
_MOST_STEPS = 20_000
_SMOOTHING = 0.5  # rows that are added for each member, and speak for it alone


@dataclass(frozen=True)
class RefittedHead:
    """One last layer, and what it is in each fold.

    Args:
        name: how it was fitted, for people.
        theta: (P,) float64, of all rows.
        folds: (K, P) float64, each without the rows of one fold.
        precision: of its prior; None without one.
    """

    name: str
    theta: Tensor
    folds: Tensor
    precision: float | None = None


def refit_head(
    name: str,
    targets: Sequence[LastLayerTarget],
    scores: Callable[[Tensor], Tensor],
    *,
    task: Task,
    precisions: Sequence[float] | None = None,
) -> RefittedHead:
    """Return the head of the prior precision whose folds predict the rows left out best.

    Args:
        name: for people.
        targets: the log posterior of all rows, then those without the rows of each fold, under a prior of any precision; one alone
            where no fold has rows of it.
        scores: returns log probabilities of the validation labels, each under the theta (K, P) of its fold, or all under one (1, P).
        task: advances once a mode.
        precisions: to try; by default decades from strong to weak priors until the score falls, then half decades around the best.

    Raises:
        NumericError: no mode was found.
    """
    modes: list[Mode | None] = [None] * len(targets)
    places = range(1, len(targets)) if len(targets) > 1 else (0,)

    def mode_at(place: int, precision: float, tolerance: float) -> Tensor:
        near = modes[place] or next((mode for mode in modes if mode is not None), None)
        target = targets[place].with_prior(targets[place].prior.with_weight_precision(precision))
        start = target.prior.center(target.layout, device=target.device) if near is None else near.theta
        modes[place] = mode = find_mode(target, start, hessian=near.hessian if near else None, tolerance=tolerance)
        task.advance()
        return mode.theta

    def folds_at(precision: float, tolerance: float) -> Tensor:
        return torch.stack([mode_at(place, precision, tolerance) for place in places])

    tried: dict[float, float] = {}

    def judge(precision: float) -> float:
        tried[precision] = float(scores(folds_at(precision, _ROUGH)).mean())
        return tried[precision]

    if precisions is None:
        best, falls = -math.inf, 0
        for decade in _DECADES:
            score = judge(10.0**decade)
            best, falls = max(best, score), 0 if score >= best else falls + 1
            if falls == _FALLS:
                break
        middle = max(tried, key=lambda precision: tried[precision])
        precisions = [middle * 10**0.5, middle / 10**0.5]
    for precision in precisions:
        judge(precision)
    chosen = max(tried, key=lambda precision: tried[precision])
    folds = folds_at(chosen, _CLOSE)
    return RefittedHead(name, mode_at(0, chosen, _CLOSE), folds, chosen)


def stacking_weights(log_scores: Tensor, *, smoothing: float = _SMOOTHING) -> Tensor:
    """Return weights (M,) float64, on the CPU, of the mixture with the largest mean log score, within 1e-6 nats a row.

    Args:
        log_scores: (N, M), log probability of each row's label under each member.
        smoothing: rows to add for each member, which only that member predicts, so that no weight is zero.
    """
    scores = log_scores.double().cpu()  # each of many small steps looks at the result
    shares = (scores - scores.amax(dim=1, keepdim=True)).exp()
    count, members = shares.shape
    weights = torch.full((members,), 1 / members, dtype=torch.float64)
    for _ in range(_MOST_STEPS):
        ratios = (shares / (shares @ weights).unsqueeze(1)).sum(dim=0) + smoothing / weights
        # At the best weights no ratio is above the number of rows; the excess bounds what is missing.
        if float(ratios.max()) - (count + members * smoothing) <= _GAP * count:
            break
        weights = weights * ratios
        weights = weights / weights.sum()
    return weights
