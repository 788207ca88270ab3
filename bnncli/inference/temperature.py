"""Temperature scaling: one number that all logits are divided by, chosen on held-out labels.

Guo, Pleiss, Sun and Weinberger (2017), "On calibration of modern neural networks", arXiv 1706.04599, section 4.2. The mean
NLL is convex in beta = 1 / T, so that Newton's method with a bracket finds its only minimum.

Of several networks whose probabilities are averaged: one temperature for all of their logits, before the mean is taken, as the mean of
networks that are calibrated each by itself is not sure enough (Rahaman and Thiery 2021, arXiv 2007.08792).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import SILENT, Progress
from bnncli.shapes import check_shapes
from bnncli.targets.stream import slices

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST, LARGEST = 1e-3, 1e3  # beyond them a temperature is no scale of logits but a sign that there is no minimum
MAX_STEPS = 100
_RELATIVE_STEP = 1e-12
_BLOCK_LOGITS = 2**22  # float64 logits held at once
SHARED_RANGE = (0.05, 20.0)  # of temperatures of several networks
_GRID = 27  # of them that are tried first, so that each is 1.26 times the last
_TOLERANCE = 1e-6  # of log T
_DIFFERENCE = 1e-4  # of T, for the slope and the curvature of each example's loss


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature of lowest NLL.

    Attributes:
        temperature: in [SMALLEST, LARGEST].
        unbounded: why there is no minimum inside, and the temperature is at the bound: separable (no class has a
            larger logit than the label, and a lower temperature is always better) or hopeless (a higher one is); None otherwise.
        nll_before, nll_after: (N,) float64, nats, of each example at temperature 1 and at this one.
    """

    temperature: float
    unbounded: str | None
    nll_before: Tensor
    nll_after: Tensor


@dataclass(frozen=True)
class LabelledLogits:
    """Logits that are to be divided by a temperature, and what judges them.

    Args:
        logits: (N, K), N at least 1.
        labels: (N,) int64 in 0..C-1; (N, C) zeros and ones where classes do not exclude each other.
        likelihood: of the labels, given the K logits.
    """

    logits: Tensor
    labels: Tensor
    likelihood: Likelihood

    def __post_init__(self) -> None:
        rows = "N" if self.likelihood.is_exclusive else f"N {self.likelihood.num_classes}"
        check_shapes(logits=(self.logits, f"N {self.likelihood.num_outputs}"), labels=(self.labels, rows))

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their logits and their labels, as many as are made float64 at once."""
        for rows in slices(0, len(self.labels), max(1, _BLOCK_LOGITS // self.likelihood.num_classes)):
            yield rows, self.logits[rows], self.labels[rows]


def fit_temperature(data: LabelledLogits, *, progress: Progress = SILENT) -> TemperatureFit:
    """The temperature of lowest mean NLL of the logits / T."""
    beta, unbounded = 1.0, None
    low, high = 1 / LARGEST, 1 / SMALLEST
    if _is_separable(data):
        beta, unbounded = high, "separable"
    elif _derivatives(data, low)[0] > 0:
        beta, unbounded = low, "hopeless"
    elif _derivatives(data, high)[0] < 0:
        beta = high
    else:
        beta = _newton(data, low=low, high=high, progress=progress)
    before, after = (_losses(data, at) for at in (1.0, beta))
    return TemperatureFit(1 / beta, unbounded, before, after)


def held_out_losses(data: LabelledLogits, fit: TemperatureFit) -> Tensor:
    """Negative log probability (N,) float64 of each label at the temperature that the other examples would have given.

    In nats. The NLL at a temperature fitted to the same labels is too low by as much as it is too high on others, about one
    part in N each: leaving out each example in turn takes that away. beta without example i is beta + g_i / (H - h_i), one
    Newton step from the minimum, with g_i and h_i its slope and curvature and H the sum of all curvatures. At a bound of
    the range, where the slope is not zero, the temperature stays.

    Args:
        data: what was fitted.
        fit: what fit_temperature gave for it.
    """
    if fit.temperature in (SMALLEST, LARGEST):
        return fit.nll_after
    beta = 1 / fit.temperature
    parts = [torch.stack(data.likelihood.loss_derivatives(logits, labels, beta)) for _, logits, labels in data.blocks()]
    slope, curvature = torch.cat(parts, dim=1)
    others = curvature.sum() - curvature
    shifted = beta + torch.where(others > 0, slope / others, 0.0)
    betas = shifted.clamp(1 / LARGEST, 1 / SMALLEST).unsqueeze(1)
    return torch.cat([data.likelihood.losses(logits, labels, betas[rows]) for rows, logits, labels in data.blocks()])


def fit_shared_temperature(logits: Tensor, labels: Tensor, likelihood: Likelihood) -> tuple[float, Tensor] | None:
    """The temperature of lowest NLL of the mean of several networks' probabilities at their logits / T, and the losses (N,) held out.

    The losses are nats, each at the temperature that the other examples would have given, as those of `held_out_losses`.

    Args:
        logits: (M, N, K).
        labels: (N,), or (N, C).

    Returns:
        None where there is no minimum between the ends of SHARED_RANGE.
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
    """Negative log of the mean over M of the probabilities of each label, (N,) float64, at logits (M, N, K) times beta, or beta (N,)."""
    found = []
    for rows in slices(0, len(labels), max(1, _BLOCK_LOGITS // (len(logits) * likelihood.num_classes))):
        scale = beta[rows].unsqueeze(1) if isinstance(beta, torch.Tensor) else beta
        logs = likelihood.decision_logs((logits[:, rows].double() * scale).permute(2, 0, 1), labels[rows])
        found.append((math.log(len(logits)) - torch.logsumexp(logs, dim=1)).mean(dim=0))
    return torch.cat(found)


def _golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between low and high has it, by golden section."""
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


def _newton(data: LabelledLogits, *, low: float, high: float, progress: Progress) -> float:
    """The zero of the slope between low and high: Newton's step where it stays inside, else the geometric middle."""
    beta, task = 1.0, progress.task("fit-temperature", MAX_STEPS)
    for _ in range(MAX_STEPS):
        slope, curvature = _derivatives(data, beta)
        task.advance()
        if slope == 0:
            return beta
        low, high = (low, beta) if slope > 0 else (beta, high)
        following = beta - slope / curvature if curvature > 0 else 0.0
        if not low < following < high:
            following = (low * high) ** 0.5
        if abs(following - beta) <= _RELATIVE_STEP * beta:
            return following
        beta = following
    return beta


def _is_separable(data: LabelledLogits) -> bool:
    """Whether no class has a larger logit than the label of any example: the NLL then falls all the way as T does.

    False where all logits of every example are equal, and all temperatures with them.
    """
    parts = [torch.stack(torch.aminmax(data.likelihood.margins(logits, labels))) for _, logits, labels in data.blocks()]
    ends = torch.stack(parts)
    return bool((ends[:, 1].max() <= 0) & (ends[:, 0].min() < 0))


def _derivatives(data: LabelledLogits, beta: float) -> tuple[float, float]:
    """Slope and curvature in beta of the mean NLL at beta."""
    total = data.logits.new_zeros(2, dtype=torch.float64)
    for _, logits, labels in data.blocks():
        total += torch.stack([part.sum() for part in data.likelihood.loss_derivatives(logits, labels, beta)])
    slope, curvature = (total / len(data.logits)).tolist()
    return slope, curvature


def _losses(data: LabelledLogits, beta: float) -> Tensor:
    """Negative log probability (N,) float64 of each label."""
    return torch.cat([data.likelihood.losses(logits, labels, beta) for _, logits, labels in data.blocks()])
