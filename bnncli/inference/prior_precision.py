"""The prior precision that predicts best: one Laplace fit for each candidate, warm-started from its neighbour.

Two criteria: the validation split's negative log likelihood under the Gaussian's Monte Carlo predictive, or Laplace's
marginal likelihood. A grid of whole decades finds the valley, halved steps and a parabola in log precision its floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnncli.errors import NumericError, UsageError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.mode import Mode
from bnncli.layout import HeadLayout
from bnncli.posteriors import standard_normal
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.likelihood import (
    block_logits,
    draw_blocks,
    label_indicators,
    log_normalizers_,
    row_blocks,
)

CRITERIA = ("val", "marglik")
NUM_DRAWS = 128  # common to all candidates: their noise cancels in comparisons
_HALVINGS = 3  # the last step is an eighth of a decade; the parabola does the rest


@dataclass(frozen=True)
class PriorSearch:
    """The outcome of a search.

    Args:
        best: the chosen prior precision.
        curve: every (prior precision, criterion) that could be fitted, in increasing order of precision; lower is better: mean
            validation nll in nats per example, or minus the log marginal likelihood in nats.
        at_edge: whether the best lies at an end of the grid, where a wider one might do better.
        criterion: val or marglik.
        center: (P,) float64, the centre of the Gaussian at the best precision: where a fit should start.
    """

    best: float
    curve: list[tuple[float, float]]
    at_edge: bool
    criterion: str
    center: Tensor


def search(
    target: LastLayerTarget,
    *,
    start: Tensor,
    generator: torch.Generator,
    structure: str = "full",
    center: str = "mode",
    criterion: str = "val",
    val_features: Tensor | None = None,
    val_labels: Tensor | None = None,
    bounds: tuple[float, float] = (1e-2, 1e5),
    progress: Progress = SILENT,
) -> PriorSearch:
    """The prior precision within bounds that minimises the criterion, to about 5 %.

    Args:
        target: the log posterior; its own prior precision is ignored.
        start: (P,), the checkpoint's head.
        generator: of the draws of the predictive.
        structure, center: of the Gaussians compared.
        criterion: val or marglik.
        val_features, val_labels: (M, D) and (M,), for val.
        bounds: lowest and highest precision of the grid.
        progress: advanced once a candidate.

    Raises:
        UsageError: when val is asked for without validation data.
        NumericError: when no candidate could be fitted.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion: expected one of {', '.join(CRITERIA)}; got {criterion!r}")
    if criterion == "val":
        if val_features is None or val_labels is None:
            raise UsageError(
                "tuning the prior precision on validation data needs a labelled val split",
                hint="extract one (--hold-out val=test:2000), give --prior-precision, or tune by marglik",
            )
        validation = (val_features.to(target.device, target.dtype), val_labels.to(target.device))
    else:
        validation = None
    grid = _grid(*bounds)
    noise = standard_normal(NUM_DRAWS, target.layout.num_params, generator, target.device)
    task = progress.task("prior precision", len(grid) + 2 * _HALVINGS + 1)
    candidates = _Candidates(target, structure, center, noise, validation, start, task)
    for log_precision in reversed(grid):
        candidates.evaluate(log_precision)
    step = grid[1] - grid[0] if len(grid) > 1 else 0.0
    for _ in range(_HALVINGS if step else 0):
        step /= 2
        middle = candidates.best
        candidates.evaluate(max(middle - step, grid[0]))
        candidates.evaluate(min(middle + step, grid[-1]))
    if step:
        candidates.evaluate(_parabola_vertex(candidates.values, candidates.best))
    best = candidates.best
    return PriorSearch(
        best=math.exp(best),
        curve=[(math.exp(key), value) for key, value in sorted(candidates.values.items()) if math.isfinite(value)],
        at_edge=best - grid[0] < 1e-9 or grid[-1] - best < 1e-9,
        criterion=criterion,
        center=candidates.centers[best],
    )


def predictive_nll(features: Tensor, labels: Tensor, theta: Tensor, layout: HeadLayout) -> float:
    """Mean negative log of the draws' average probability of the label, nats per example.

    Args:
        features: (M, D).
        labels: (M,).
        theta: (S, P), draws.
        layout: how weight and bias lie in theta.
    """
    theta = theta.to(features)
    total = 0.0
    for rows in row_blocks(features.shape[0], layout.num_outputs * theta.shape[0], features.device):
        indicators = label_indicators(labels[rows], layout, features.dtype).unsqueeze(1)
        parts = []
        for block in draw_blocks(theta, layout):
            logits = block_logits(features[rows], block, layout)
            label_logits = (logits * indicators).sum(dim=0)
            parts.append(label_logits - log_normalizers_(logits))
        log_mean = torch.cat(parts).double().logsumexp(dim=0) - math.log(theta.shape[0])
        total -= float(log_mean.sum())
    return total / features.shape[0]


@dataclass
class _Candidates:
    """The precisions tried so far, by their logarithm."""

    target: LastLayerTarget
    structure: str
    center: str
    noise: Tensor
    validation: tuple[Tensor, Tensor] | None
    start: Tensor
    task: Task
    values: dict[float, float] = field(default_factory=dict)
    centers: dict[float, Tensor] = field(default_factory=dict)
    modes: dict[float, Mode] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The log precision of the lowest value."""
        finite = {key: value for key, value in self.values.items() if math.isfinite(value)}
        if not finite:
            raise NumericError("no prior precision gave a finite criterion", hint="give --prior-precision")
        return min(finite, key=finite.__getitem__)

    def evaluate(self, log_precision: float) -> None:
        """Fits and judges one precision, unless it is known."""
        self.task.advance(note=f"{math.exp(log_precision):.3g}")
        if any(abs(log_precision - known) < 1e-9 for known in self.values):
            return
        try:
            fit = self._fit(log_precision)
        except NumericError:  # no mode under this prior: not the best, and no reason to give up the others
            self.values[log_precision] = math.inf
            return
        if self.validation is None:
            value = -fit.log_marginal_likelihood
        else:
            theta = fit.gaussian.from_noise(self.noise)[0]
            value = predictive_nll(*self.validation, theta, self.target.layout)
        self.values[log_precision] = value
        self.centers[log_precision] = fit.gaussian.mean

    def _fit(self, log_precision: float) -> LaplaceFit:
        target = self.target.with_prior_precision(math.exp(log_precision))
        start, hessian = self.start, None
        if self.modes:
            nearest = self.modes[min(self.modes, key=lambda known: abs(known - log_precision))]
            start, hessian = nearest.theta, nearest.hessian
        fit = fit_gaussian(target, start=start, structure=self.structure, center=self.center, mode_hessian=hessian)
        if fit.mode is not None:
            # A full Hessian at the mode itself beats the one that led there.
            at_mode = fit.hessian if self.structure == "full" else fit.mode.hessian
            self.modes[log_precision] = replace(fit.mode, hessian=at_mode)
        return fit


def _grid(lowest: float, highest: float) -> list[float]:
    """Log precisions from lowest to highest, about a decade apart."""
    if not 0 < lowest <= highest:
        raise ValueError(f"bounds: expected 0 < lowest <= highest, got {lowest}, {highest}")
    steps = max(1, round(math.log10(highest / lowest)))
    if lowest == highest:
        return [math.log(lowest)]
    return [math.log(lowest) + i * math.log(highest / lowest) / steps for i in range(steps + 1)]


def _parabola_vertex(values: dict[float, float], best: float) -> float:
    """The minimum of the parabola through the best point and its two neighbours; the best itself at an end."""
    keys = sorted(values)
    place = keys.index(best)
    if place in (0, len(keys) - 1):
        return best
    left, right = keys[place - 1], keys[place + 1]
    a, b = best - left, best - right
    rise_left, rise_right = values[best] - values[left], values[best] - values[right]
    bend = a * rise_right - b * rise_left
    if not math.isfinite(bend) or bend == 0:
        return best
    return min(max(best - 0.5 * (a * a * rise_right - b * b * rise_left) / bend, left), right)
