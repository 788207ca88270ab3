"""Temperature scaling, and stacking of refitted last layers by held-out predictive density."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.inference.mode import Mode, find_mode
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import SILENT, Progress, Task
from bnncli.shapes import check_shapes
from bnncli.targets.blocks import slices
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor


SMALLEST, LARGEST = 1e-3, 1e3  # a temperature outside is no scale of logits but a sign that there is no minimum
MAX_STEPS = 100
_RELATIVE_STEP = 1e-12
_BLOCK_LOGITS = 2**22  # float64 logits held at once
SHARED_RANGE = (0.05, 20.0)  # of the temperature of several networks
_GRID = 27  # grid points in it, a factor of 1.26 apart
_TOLERANCE = 1e-6  # of log T
_DIFFERENCE = 1e-4  # of T, for slope and curvature of each example's loss


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
        for rows in slices(0, len(self.labels), max(1, _BLOCK_LOGITS // self.likelihood.num_classes)):
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
    for rows in slices(0, len(labels), max(1, _BLOCK_LOGITS // (len(logits) * likelihood.num_classes))):
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
        task: advances once per mode.
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
                break
        middle = max(tried, key=lambda precision: tried[precision])
        precisions = [middle * 10**0.5, middle / 10**0.5]
    for precision in precisions:
        judge(precision)
    chosen = max(tried, key=lambda precision: tried[precision])
    folds = folds_at(chosen, _CLOSE)
    return RefittedHead(name, mode_at(0, chosen, _CLOSE), folds, chosen)


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
