"""Stacking of refitted last layers by held-out predictive density, and one temperature shared by several networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.evaluation.temperature import BLOCK_LOGITS
from bnncli.inference.mode import Mode, find_mode
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import Task
from bnncli.targets.blocks import slices
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor


SHARED_RANGE = (0.05, 20.0)  # of the temperature of several networks
_GRID = 27  # grid points in it, a factor of 1.26 apart
_TOLERANCE = 1e-6  # of log T
_DIFFERENCE = 1e-4  # of T, for slope and curvature of each example's loss


def fit_shared_temperature(logits: Tensor, labels: Tensor, likelihood: Likelihood) -> tuple[float, Tensor] | None:
    """Fit the temperature with the lowest NLL of the mean of several networks' probabilities; also return losses (N,).

    The losses are leave-one-out, in nats, as in `held_out_losses`.

    Args:
        logits: (M, N, K).
        labels: (N,), or (N, C).

    Returns:
        None if there is no minimum within SHARED_RANGE.
    """

    def mean_loss(log_beta: float) -> float:
        return float(_mixture_losses(logits, labels, likelihood, math.exp(log_beta)).mean())

    low, high = (-math.log(end) for end in reversed(SHARED_RANGE))
    grid = [low + place * (high - low) / (_GRID - 1) for place in range(_GRID)]
    values = [mean_loss(at) for at in grid]
    best = min(range(_GRID), key=values.__getitem__)
    if best in (0, _GRID - 1) or not math.isfinite(values[best]):
        return None
    beta = math.exp(_golden(mean_loss, grid[best - 1], grid[best + 1]))
    step = beta * _DIFFERENCE
    below, here, above = (_mixture_losses(logits, labels, likelihood, beta + sign * step) for sign in (-1, 0, 1))
    slope, curvature = (above - below) / (2 * step), (above - 2 * here + below) / step**2
    others = curvature.sum() - curvature
    betas = (beta + torch.where(others > 0, slope / others, 0.0)).clamp(math.exp(low), math.exp(high))
    return 1 / beta, _mixture_losses(logits, labels, likelihood, betas)


def _mixture_losses(logits: Tensor, labels: Tensor, likelihood: Likelihood, beta: float | Tensor) -> Tensor:
    """Return -log of the mean over M of each label's probability, (N,) float64, at logits (M, N, K) times beta or beta (N,)."""
    found = []
    for rows in slices(0, len(labels), max(1, BLOCK_LOGITS // (len(logits) * likelihood.num_classes))):
        scale = beta[rows].unsqueeze(1) if isinstance(beta, torch.Tensor) else beta
        logs = likelihood.decision_logs((logits[:, rows].double() * scale).permute(2, 0, 1), labels[rows])
        found.append((math.log(len(logits)) - torch.logsumexp(logs, dim=1)).mean(dim=0))
    return torch.cat(found)


def _golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a unimodal function between low and high, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [value(at) for at in inner]
    while high - low > _TOLERANCE:
        if values[0] <= values[1]:
            high, inner, values = inner[1], [inner[1] - ratio * (inner[1] - low), inner[0]], [math.nan, values[0]]
            values[0] = value(inner[0])
        else:
            low, inner, values = inner[0], [inner[1], inner[0] + ratio * (high - inner[0])], [values[1], math.nan]
            values[1] = value(inner[1])
    return (low + high) / 2


_DECADES = (5, 4, 3, 2, 1, 0, -1, -2)  # of precisions, strongest first: each mode starts from the previous one
_FALLS = 2  # the walk ends after the score has fallen this often in a row
# Tolerances of modes that are compared and of chosen ones, in posterior standard deviations over all parameters.
_ROUGH, _CLOSE = 0.3, 0.02
_GAP = 1e-6  # nats per row between the weights found and the best
_MOST_STEPS = 20_000
_SMOOTHING = 0.5  # rows added for each member, which only it predicts


@dataclass(frozen=True)
class RefittedHead:
    """A refitted last layer, and its versions for each fold.

    Args:
        name: how it was fitted, for people.
        theta: (P,) float64, from all rows.
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
    """Return the head of the prior precision whose folds predict the left-out rows best.

    Args:
        name: for people.
        targets: log posterior of all rows, then those without the rows of each fold, under priors of any precision; a
            single one if no fold has rows of it.
        scores: returns log probabilities of the validation labels, each under the theta (K, P) of its fold, or all
            under one (1, P).
        task: advances `count_modes` units.
        precisions: to try; by default decades from strong to weak priors until the score falls, then half decades
            around the best.

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
                task.advance((len(_DECADES) - len(tried)) * len(places))  # not tried
                break
        middle = max(tried, key=lambda precision: tried[precision])
        precisions = [middle * 10**0.5, middle / 10**0.5]
    for precision in precisions:
        judge(precision)
    chosen = max(tried, key=lambda precision: tried[precision])
    folds = folds_at(chosen, _CLOSE)
    return RefittedHead(name, mode_at(0, chosen, _CLOSE), folds, chosen)


def count_modes(num_targets: int, precisions: Sequence[float] | None) -> int:
    """Return the largest number of modes that `refit_head` finds for so many targets."""
    num_tried = len(_DECADES) + 2 if precisions is None else len(precisions)
    return (num_tried + 1) * max(1, num_targets - 1) + 1


def stacking_weights(log_scores: Tensor, *, smoothing: float = _SMOOTHING) -> Tensor:
    """Return the weights (M,) float64, on the CPU, of the mixture with the largest mean log score, within 1e-6 nats per row.

    Args:
        log_scores: (N, M), log probability of each row's label under each member.
        smoothing: rows added for each member, which only that member predicts, so that no weight is zero.
    """
    scores = log_scores.double().cpu()  # each of many small steps reads the result
    shares = (scores - scores.amax(dim=1, keepdim=True)).exp()
    count, members = shares.shape
    weights = torch.full((members,), 1 / members, dtype=torch.float64)
    for _ in range(_MOST_STEPS):
        ratios = (shares / (shares @ weights).unsqueeze(1)).sum(dim=0) + smoothing / weights
        # At the optimum no ratio exceeds the number of rows; the excess bounds the gap.
        if float(ratios.max()) - (count + members * smoothing) <= _GAP * count:
            break
        weights = weights * ratios
        weights = weights / weights.sum()
    return weights
