"""Further ways to choose prior precisions: cross-validation, one precision per layer, and a search under another posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.covariances import varying_places
from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_search import (
    BOUNDS,
    LARGE_SLACK,
    PLUG_IN,
    SAMPLED,
    TOLERANCES,
    Candidates,
    approach,
    criterion_of,
    descend,
    first_near_the_best,
    grid_of,
    is_at_edge,
    num_judged,
)
from bnncli.lazy import torch
from bnncli.parameters.module import module_places
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.target import CurvedTarget, HeldOut

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.parameters.layouts import ParamLayout


class Fold(NamedTuple):
    """A target without some rows, those rows, and how many they are."""

    target: CurvedTarget
    held_out: HeldOut
    num_held_out: int


@dataclass(frozen=True)
class FoldSearch:
    """The outcome of a search.

    Args:
        best: the chosen prior precision.
        curve: every (prior precision, mean NLL of the rows left out in nats per example), in increasing order of precision.
        at_edge: as of PriorSearch.
        structure: of the candidates.
        fits: of each fold at the best.
        integrator: as of PriorSearch.
    """

    best: float
    curve: list[tuple[float, float]]
    at_edge: bool
    structure: str
    fits: list[LaplaceFit]
    integrator: str = SAMPLED


def stratified_folds(labels: Tensor, num_folds: int, generator: torch.Generator) -> Tensor:
    """The fold of each row, (N,) uint8: sizes differ by one at most, and so do those of each class within a fold.

    Args:
        labels: (N,); of (N, L) indicators only sizes are even.
        generator: of the permutation, on the CPU.
    """
    order = torch.randperm(len(labels), generator=generator)
    if labels.ndim == 1:
        order = order[labels.cpu()[order].argsort(stable=True)]
    folds = torch.empty(len(labels), dtype=torch.uint8)
    folds[order] = (torch.arange(len(labels)) % num_folds).to(torch.uint8)
    return folds


def search_folds(
    folds: Sequence[Fold],
    *,
    start: Tensor,
    generator: torch.Generator,
    structure: str,
    is_large: bool = False,
    progress: Progress = SILENT,
) -> FoldSearch:
    """Search for the prior precision that predicts the rows left out best, as prior_precision.search does by val.

    Args:
        folds: whose priors differ in their means at most.
    """
    target = folds[0].target
    grid = grid_of(target, BOUNDS, generator)
    criterion = criterion_of(target, structure, folds[0].held_out, None, generator, by_logits=is_large)
    task, slack = progress.task("prior precision", num_judged(grid) * len(folds)), LARGE_SLACK if is_large else 1.0
    parts = []
    for fold in folds:
        own = replace(criterion, held_out=fold.held_out)  # draws have the same noise in all
        parts.append(Candidates(fold.target, structure, "mode", own, start, TOLERANCES["val"], task, mode_slack=slack))
    candidates = _Folds(parts, [fold.num_held_out for fold in folds])
    fits = descend(candidates, grid, is_brief=is_large)
    chosen, integrator = candidates, SAMPLED
    centers = candidates.by_plug_in(progress.task("prior precision of the mode", num_judged(grid) * len(folds)))
    if centers.values[centers.best] < candidates.values[candidates.best]:
        approach(centers, grid, is_brief=is_large)
        losses = {SAMPLED: candidates.losses(fits), PLUG_IN: centers.plug_in_losses()}
        if first_near_the_best(losses) == PLUG_IN:
            candidates.judge(centers.best)
            of_centers = candidates.fit(centers.best)
            if of_centers is not None:
                fits, chosen, integrator = of_centers, centers, PLUG_IN
    curve = [(math.exp(key), value) for key, value in sorted(chosen.values.items())]
    return FoldSearch(math.exp(chosen.best), curve, is_at_edge(chosen.best, grid, target), structure, fits, integrator)


@dataclass(frozen=True)
class _Folds:
    """Candidates of all folds as those of one search: each is judged by the mean over all rows that are left out."""

    parts: list[Candidates]
    sizes: list[int]

    @property
    def target(self) -> CurvedTarget:
        """The first fold's."""
        return self.parts[0].target

    @property
    def values(self) -> dict[float, float]:
        """The mean NLL by log precision, of those that could be fitted in every fold."""
        of_parts = [part.values for part in self.parts]
        known = set.intersection(*(set(values) for values in of_parts))
        total = sum(self.sizes)
        return {
            key: sum(size * values[key] for size, values in zip(self.sizes, of_parts, strict=True)) / total
            for key in known
        }

    @property
    def own_log_precision(self) -> float:
        """The first fold's."""
        return self.parts[0].own_log_precision

    @property
    def best(self) -> float:
        """The log precision of the lowest mean."""
        values = self.values
        if not values:
            raise NumericError("the criterion is not finite for any prior precision", hint="give \0prior_precision\0")
        return min(values, key=lambda key: values[key])

    def by_plug_in(self, task: Task) -> _Folds:
        """The same precisions, judged by the centres alone."""
        return _Folds([part.by_plug_in(task) for part in self.parts], self.sizes)

    def losses(self, fits: Sequence[LaplaceFit]) -> Tensor:
        """The losses of all rows that are left out, (M,), each by the fit of its fold."""
        gaussians = [fit.gaussian for fit in fits]
        return torch.cat(
            [
                part.criterion.losses(part.target.with_prior(one.require_prior()), one.mean, one.covariance)
                for part, one in zip(self.parts, gaussians, strict=True)
            ]
        )

    def plug_in_losses(self) -> Tensor:
        """The losses of all rows that are left out, (M,), each by the best centre of its fold."""
        return torch.cat([part.criterion.plug_in_losses(part.known[self.best].theta) for part in self.parts])

    def judge(self, log_precision: float) -> None:
        """Judges one in every fold."""
        for part in self.parts:
            part.judge(log_precision)

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judges several in every fold."""
        for part in self.parts:
            part.judge_all(log_precisions)

    def fit(self, log_precision: float) -> list[LaplaceFit] | None:
        """The exact fit of every fold; None where one has none."""
        fits = [part.fit(log_precision) for part in self.parts]
        return None if any(fit is None for fit in fits) else [fit for fit in fits if fit is not None]


LAYER_BOUNDS = (1e-4, 1e7)  # of a precision: a layer of zeros would have any, however large
_MOST_UPDATES = 200
_TOLERANCE = 1e-3  # of a log precision
_SLOWEST = 0.125  # of a step, which turns back where it is longer than twice the way
_STEP = 1e-3  # of a log precision, for differences of the log determinant: central, so wrong by a millionth


@dataclass(frozen=True)
class LayerPrecisions:
    """What was chosen.

    Args:
        fit: the Gaussian under it.
        precisions: by module, of those that vary.
        gain: in log marginal likelihood over the fit that it started from, nats.
    """

    fit: LaplaceFit
    precisions: dict[str, float]
    gain: float


def choose_layer_precisions(target: CurvedTarget, start: LaplaceFit, structure: str) -> LayerPrecisions:
    """The Gaussian about the mean of `start`, of the same H, under the best precision of each layer.

    Raises:
        NumericError: H plus the prior's precisions is not positive definite.
    """
    theta, layout = start.gaussian.mean, target.layout
    varies = _varies(start.gaussian.covariance, theta)
    places = {name: place for name, place in module_places(layout).items() if bool(varies[place].any())}
    moving = varies * theta.square()
    squares = torch.tensor([float(moving[place].sum()) for place in places.values()], dtype=torch.float64)
    sizes = torch.tensor([float(varies[place].sum()) for place in places.values()], dtype=torch.float64)
    first = start.gaussian.require_prior().weight_precision
    logs = torch.full_like(sizes, math.log(first))

    def under(logs: Tensor) -> CurvedTarget:
        return target.with_prior(_prior(dict(zip(places, logs.exp().tolist(), strict=True)), first, layout))

    def covariance_under(logs: Tensor) -> Covariance:
        return covariance_at(under(logs), theta, structure, hessian=start.hessian).covariance

    def value(logs: Tensor, covariance: Covariance) -> float:
        return covariance.log_det_scale() + 0.5 * float((sizes * logs - logs.exp() * squares).sum())

    def shares(logs: Tensor, covariance: Covariance) -> Tensor:
        """lambda_l t_l of each layer, (L,)."""
        marginal = getattr(covariance, "marginal_variances", None)
        if marginal is not None:
            own = marginal()
            return logs.exp() * torch.tensor(
                [float(own[place].sum()) for place in places.values()], dtype=torch.float64
            )
        found = []
        for index in range(len(logs)):
            change = torch.zeros_like(logs)
            change[index] = _STEP
            up, down = (covariance_under(logs + sign * change).log_det_scale() for sign in (1, -1))
            found.append((down - up) / _STEP)
        return torch.tensor(found, dtype=torch.float64)

    covariance = covariance_under(logs)
    reached = begun = value(logs, covariance)
    pace, before = torch.ones_like(sizes), torch.zeros_like(sizes)
    for _ in range(_MOST_UPDATES):
        taken = shares(logs, covariance).clamp(torch.zeros_like(sizes), sizes)
        aim = quick_update(sizes, squares, taken)
        step = aim - logs
        pace, before = torch.where(step * before < 0, 0.5 * pace, pace).clamp_min(_SLOWEST), step
        new = torch.where(pace < 1, logs + pace * step, aim)
        proposed = covariance_under(new)
        if not value(new, proposed) >= reached:
            aim = new = safe_update(sizes, squares, taken * (-logs).exp())
            proposed = covariance_under(new)
        missed = float((aim - logs).abs().max())
        logs, covariance, reached = new, proposed, value(new, proposed)
        if missed < _TOLERANCE:
            break
    if not math.isfinite(reached):
        raise NumericError(
            "the marginal likelihood of the per-layer precisions is not finite", hint="give \0prior_precision\0"
        )
    fit = fit_gaussian(under(logs), start=theta, structure=structure, center="checkpoint", hessian=start.hessian)
    precisions = {name: float(one) for name, one in zip(places, logs.exp(), strict=True)}
    return LayerPrecisions(fit, precisions, reached - begun)


def quick_update(sizes: Tensor, squares: Tensor, shares: Tensor) -> Tensor:
    """MacKay's, log precisions (L,), of P_l, |theta_l|^2 and lambda_l t_l, (L,) each."""
    return _within_bounds((sizes - shares).clamp_min(1e-12) / squares)


def safe_update(sizes: Tensor, squares: Tensor, traces: Tensor) -> Tensor:
    """The one that never lowers log Z, log precisions (L,), of P_l, |theta_l|^2 and t_l, (L,) each."""
    return _within_bounds(sizes / (squares + traces))


def _within_bounds(precisions: Tensor) -> Tensor:
    low, high = map(math.log, LAYER_BOUNDS)
    return precisions.log().clamp(low, high)


def _varies(covariance: Covariance, theta: Tensor) -> Tensor:
    """One for each parameter that varies, zero for one that a covariance fixes at theta (P,)."""
    places = varying_places(covariance)
    if places is None:
        return torch.ones_like(theta)
    return torch.zeros_like(theta).index_fill(0, places, 1.0)


def _prior(precisions: dict[str, float], otherwise: float, layout: ParamLayout) -> Prior:
    """The prior of modules' precisions by name, a number for each part of theta; another one of modules that do not vary."""
    found = {module: precisions.get(module, otherwise) for module in module_places(layout)}
    return Prior.of_parts([found[part.name.rpartition(".")[0]] for part in layout.parts], layout)


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
