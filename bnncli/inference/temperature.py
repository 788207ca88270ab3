"""Temperature scaling: one number that all logits are divided by, chosen on held-out labels.

Guo, Pleiss, Sun and Weinberger (2017), "On calibration of modern neural networks", arXiv 1706.04599, section 4.2. The mean
NLL is convex in beta = 1 / T, so that Newton's method with a bracket finds its only minimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bnncli.progress import SILENT, Progress
from bnncli.shapes import check_shapes
from bnncli.targets.stream import slices

SMALLEST, LARGEST = 1e-3, 1e3  # beyond them a temperature is no scale of logits but a sign that there is no minimum
MAX_STEPS = 100
_RELATIVE_STEP = 1e-12
_BLOCK_LOGITS = 2**22  # float64 logits held at once


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


def fit_temperature(logits: Tensor, labels: Tensor, *, progress: Progress = SILENT) -> TemperatureFit:
    """The temperature of lowest mean NLL of softmax(logits / T).

    Args:
        logits: (N, C), N at least 1.
        labels: (N,) int64 in 0..C-1.
    """
    check_shapes(logits=(logits, "N C"), labels=(labels, "N"))
    beta, unbounded = 1.0, None
    low, high = 1 / LARGEST, 1 / SMALLEST
    if _is_separable(logits, labels):
        beta, unbounded = high, "separable"
    elif _derivatives(logits, labels, low)[0] > 0:
        beta, unbounded = low, "hopeless"
    elif _derivatives(logits, labels, high)[0] < 0:
        beta = high
    else:
        beta = _newton(logits, labels, low=low, high=high, progress=progress)
    before, after = (_losses(logits, labels, at) for at in (1.0, beta))
    return TemperatureFit(1 / beta, unbounded, before, after)


def held_out_losses(logits: Tensor, labels: Tensor, fit: TemperatureFit) -> Tensor:
    """Negative log probability (N,) float64 of each label at the temperature that the other examples would have given.

    In nats. The NLL at a temperature fitted to the same labels is too low by as much as it is too high on others, about one
    part in N each: leaving out each example in turn takes that away. beta without example i is beta + g_i / (H - h_i), one
    Newton step from the minimum, with g_i and h_i its slope and curvature and H the sum of all curvatures. At a bound of
    the range, where the slope is not zero, the temperature stays.

    Args:
        logits, labels: those that were fitted, (N, C) and (N,).
        fit: what fit_temperature gave for them.
    """
    if fit.temperature in (SMALLEST, LARGEST):
        return fit.nll_after
    beta = 1 / fit.temperature
    parts = [torch.stack(_slopes(logits, labels, rows, beta)) for rows in _rows(logits)]
    slope, curvature = torch.cat(parts, dim=1)
    others = curvature.sum() - curvature
    shifted = beta + torch.where(others > 0, slope / others, 0.0)
    betas = shifted.clamp(1 / LARGEST, 1 / SMALLEST).unsqueeze(1)
    return torch.cat([torch.logsumexp(betas[rows] * _centred(logits, labels, rows), dim=1) for rows in _rows(logits)])


def _newton(logits: Tensor, labels: Tensor, *, low: float, high: float, progress: Progress) -> float:
    """The zero of the slope between low and high: Newton's step where it stays inside, else the geometric middle."""
    beta, task = 1.0, progress.task("fit-temperature", MAX_STEPS)
    for _ in range(MAX_STEPS):
        slope, curvature = _derivatives(logits, labels, beta)
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


def _is_separable(logits: Tensor, labels: Tensor) -> bool:
    """Whether no class has a larger logit than the label of any example: the NLL then falls all the way as T does.

    False where all logits of every example are equal, and all temperatures with them.
    """
    parts = [torch.stack(torch.aminmax(_centred(logits, labels, rows))) for rows in _rows(logits)]
    ends = torch.stack(parts)
    return bool((ends[:, 1].max() <= 0) & (ends[:, 0].min() < 0))


def _derivatives(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float]:
    """Slope and curvature in beta of the mean NLL at beta: mean and variance of the logits under the softmax."""
    total = logits.new_zeros(2, dtype=torch.float64)
    for rows in _rows(logits):
        total += torch.stack([part.sum() for part in _slopes(logits, labels, rows, beta)])
    slope, curvature = (total / len(logits)).tolist()
    return slope, curvature


def _slopes(logits: Tensor, labels: Tensor, rows: slice, beta: float) -> tuple[Tensor, Tensor]:
    """Slope and curvature (n,) in beta of the NLL of each example of the rows."""
    centred = _centred(logits, labels, rows)
    probs = torch.softmax(beta * centred, dim=1)
    mean = (probs * centred).sum(dim=1)
    return mean, (probs * (centred - mean.unsqueeze(1)).square()).sum(dim=1)


def _losses(logits: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Negative log probability (N,) float64 of each label."""
    return torch.cat([torch.logsumexp(beta * _centred(logits, labels, rows), dim=1) for rows in _rows(logits)])


def _centred(logits: Tensor, labels: Tensor, rows: slice) -> Tensor:
    """Logits less the label's own, (n, C) float64: what the NLL is the log sum exp of."""
    block = logits[rows].double()
    return block - block.gather(1, labels[rows].unsqueeze(1))


def _rows(logits: Tensor) -> list[slice]:
    return list(slices(0, logits.shape[0], max(1, _BLOCK_LOGITS // logits.shape[1])))
