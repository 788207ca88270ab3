"""Temperature scaling: the one number that divides all logits, fitted to labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import SILENT, Progress
from bnncli.shapes import check_shapes
from bnncli.targets.blocks import slices

if TYPE_CHECKING:
    from torch import Tensor


SMALLEST, LARGEST = 1e-3, 1e3  # a temperature outside is no scale of logits but a sign that there is no minimum
MAX_STEPS = 100
_RELATIVE_STEP = 1e-12
BLOCK_LOGITS = 2**22  # float64 logits held at once


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature with the lowest NLL.

    Attributes:
        temperature: in [SMALLEST, LARGEST].
        unbounded: why there is no minimum inside and the temperature is at a bound: separable (no class has a larger
            logit than the label, so lower is always better) or hopeless (higher is always better); else None.
        nll_before, nll_after: (N,) float64, nats per example at temperature 1 and at this one.
    """

    temperature: float
    unbounded: str | None
    nll_before: Tensor
    nll_after: Tensor


@dataclass(frozen=True)
class LabelledLogits:
    """Logits to scale by a temperature, and their labels.

    Args:
        logits: (N, K), N at least 1.
        labels: (N,) int64 in 0..C-1; (N, C) zeros and ones for multi-label.
        likelihood: of the labels, given the K logits.
    """

    logits: Tensor
    labels: Tensor
    likelihood: Likelihood

    def __post_init__(self) -> None:
        rows = "N" if self.likelihood.is_exclusive else f"N {self.likelihood.num_classes}"
        check_shapes(logits=(self.logits, f"N {self.likelihood.num_outputs}"), labels=(self.labels, rows))

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, logits and labels in blocks to convert to float64."""
        for rows in slices(0, len(self.labels), max(1, BLOCK_LOGITS // self.likelihood.num_classes)):
            yield rows, self.logits[rows], self.labels[rows]


def fit_temperature(data: LabelledLogits, *, progress: Progress = SILENT) -> TemperatureFit:
    """Fit the temperature with the lowest mean NLL of logits / T."""
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
    """Return leave-one-out losses (N,) float64: -log p of each label at the temperature fitted to the other examples.

    In nats. The NLL at a temperature fitted to the same labels is biased downwards by about one part in N. Without
    example i, beta = 1 / T is beta + g_i / (H - h_i), one Newton step from the minimum, with g_i and h_i its slope and
    curvature and H the sum of all curvatures. At a bound of the range, where the slope is not zero, the temperature
    does not change.

    Args:
        data: what was fitted.
        fit: result of fit_temperature.
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


def _newton(data: LabelledLogits, *, low: float, high: float, progress: Progress) -> float:
    """Return the zero of the slope between low and high: Newton steps that stay inside, else the geometric mean."""
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
    """Return whether no class has a larger logit than any example's label, so that the NLL decreases with T throughout.

    False if all logits of every example are equal, and with them all temperatures.
    """
    parts = [torch.stack(torch.aminmax(data.likelihood.margins(logits, labels))) for _, logits, labels in data.blocks()]
    ends = torch.stack(parts)
    return bool((ends[:, 1].max() <= 0) & (ends[:, 0].min() < 0))


def _derivatives(data: LabelledLogits, beta: float) -> tuple[float, float]:
    """Return slope and curvature in beta of the mean NLL at beta."""
    total = data.logits.new_zeros(2, dtype=torch.float64)
    for _, logits, labels in data.blocks():
        total += torch.stack([part.sum() for part in data.likelihood.loss_derivatives(logits, labels, beta)])
    slope, curvature = (total / len(data.logits)).tolist()
    return slope, curvature


def _losses(data: LabelledLogits, beta: float) -> Tensor:
    """Return -log p (N,) float64 of each label."""
    return torch.cat([data.likelihood.losses(logits, labels, beta) for _, logits, labels in data.blocks()])
