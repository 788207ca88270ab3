"""Other ways to choose prior precisions: cross-validation, one precision per layer, and a search under another posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.recommendation import WORSE_SHARE
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD
from bnncli.inference.elbo import JUDGING_DRAWS
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_search import (
    BOUNDS,
    LARGE_SLACK,
    PLUG_IN,
    SAMPLED,
    TOLERANCES,
    Candidates,
    choose_pace,
    first_near_the_best,
    is_at_edge,
    judge_precisions,
    make_criterion,
    num_candidates,
    precision_grid,
    search_lowest_fit,
)
from bnncli.lazy import torch
from bnncli.parameters.module import module_places
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress, Task
from bnncli.structures import varying_places
from bnncli.targets.target import CurvedTarget, HeldOut, Target

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.layouts import ParamLayout
    from bnncli.structures import Covariance


class Fold(NamedTuple):
    """A target without some rows, those rows, and their number."""

    target: CurvedTarget
    held_out: HeldOut
    num_held_out: int


@dataclass(frozen=True)
class FoldSearch:
    """The result of a cross-validated search.

    Args:
        best: the chosen prior precision.
        curve: all (prior precision, mean NLL of the left-out rows in nats per example), by increasing precision.
        at_edge: as in PriorSearch.
        structure: of the candidates.
        fits: of each fold at the best.
        integrator: as in PriorSearch.
    """

    best: float
    curve: list[tuple[float, float]]
    at_edge: bool
    structure: str
    fits: list[LaplaceFit]
    integrator: str = SAMPLED


def stratified_folds(
    labels: Tensor, num_folds: int, generator: torch.Generator, *, groups: RowGroups | None = None
) -> Tensor:
    """Return the fold of each row, (N,) uint8; fold sizes differ by at most one, also within each class.

    Groups stay whole: the largest first, otherwise in random order, each joins the smallest fold, whatever the labels.

    Args:
        labels: (N,); for (N, L) indicators, only the sizes are balanced.
        generator: CPU generator of the permutation.
        groups: groups of dependent rows, at least as many as folds; None if all rows are independent.
    """
    if groups is not None:
        order = torch.randperm(len(groups), generator=generator)
        sizes, totals = torch.from_numpy(groups.sizes), [0] * num_folds
        fold_of = torch.empty(len(groups), dtype=torch.uint8)
        for group in order[sizes[order].argsort(descending=True, stable=True)].tolist():
            fold_of[group] = smallest = min(range(num_folds), key=totals.__getitem__)
            totals[smallest] += int(sizes[group])
        return fold_of[torch.from_numpy(groups.index)]
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
    """Search for the prior precision that predicts left-out rows best, as prior_search.search does with val.

    Args:
        folds: their priors may differ only in their means.
    """
    target = folds[0].target
    grid = precision_grid(target, BOUNDS, generator)
    criterion = make_criterion(target, structure, folds[0].held_out, None, generator, by_logits=is_large)
    task, slack = progress.task("prior precision", num_candidates(grid) * len(folds)), LARGE_SLACK if is_large else 1.0
    parts = []
    for fold in folds:
        own = replace(criterion, held_out=fold.held_out)  # same noise for all folds
        parts.append(Candidates(fold.target, structure, "mode", own, start, TOLERANCES["val"], task, mode_slack=slack))
    candidates = _Folds(parts, [fold.num_held_out for fold in folds])
    pace = choose_pace(target, is_large=is_large)
    fits = search_lowest_fit(candidates, grid, pace)
    chosen, integrator = candidates, SAMPLED
    centers = candidates.by_plug_in(progress.task("prior precision of the mode", num_candidates(grid) * len(folds)))
    if centers.values[centers.best] < candidates.values[candidates.best]:
        judge_precisions(centers, grid, pace)
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
    """Candidates of all folds as one search, judged by the mean over all left-out rows."""

    parts: list[Candidates]
    sizes: list[int]

    @property
    def target(self) -> CurvedTarget:
        """The first fold's target."""
        return self.parts[0].target

    @property
    def values(self) -> dict[float, float]:
        """Mean NLL by log precision, for those fitted in every fold."""
        of_parts = [part.values for part in self.parts]
        known = set.intersection(*(set(values) for values in of_parts))
        total = sum(self.sizes)
        return {
            key: sum(size * values[key] for size, values in zip(self.sizes, of_parts, strict=True)) / total
            for key in known
        }

    @property
    def own_log_precision(self) -> float:
        """The first fold's own log precision."""
        return self.parts[0].own_log_precision

    @property
    def best(self) -> float:
        """Log precision of the lowest mean."""
        values = self.values
        if not values:
            raise NumericError("the criterion is not finite for any prior precision", hint="give \0prior_precision\0")
        return min(values, key=lambda key: values[key])

    def by_plug_in(self, task: Task) -> _Folds:
        """Return the same candidates, judged by their centres only."""
        return _Folds([part.by_plug_in(task) for part in self.parts], self.sizes)

    def losses(self, fits: Sequence[LaplaceFit]) -> Tensor:
        """Return the losses of all left-out rows, (M,), each under the fit of its fold."""
        gaussians = [fit.gaussian for fit in fits]
        return torch.cat(
            [
                part.criterion.losses(part.target.with_prior(one.require_prior()), one.mean, one.covariance)
                for part, one in zip(self.parts, gaussians, strict=True)
            ]
        )

    def plug_in_losses(self) -> Tensor:
        """Return the losses of all left-out rows, (M,), each under the best centre of its fold."""
        return torch.cat([part.criterion.plug_in_losses(part.known[self.best].theta) for part in self.parts])

    def judge(self, log_precision: float) -> None:
        """Judge one precision in every fold."""
        for part in self.parts:
            part.judge(log_precision)

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judge several precisions in every fold."""
        for part in self.parts:
            part.judge_all(log_precisions)

    def fit(self, log_precision: float) -> list[LaplaceFit] | None:
        """Return the exact fit of every fold; None if any fails."""
        fits = [part.fit(log_precision) for part in self.parts]
        return None if any(fit is None for fit in fits) else [fit for fit in fits if fit is not None]


LAYER_BOUNDS = (1e-4, 1e7)  # of a precision; a layer of zeros would have any, however large
_MOST_UPDATES = 200
_TOLERANCE = 1e-3  # of a log precision
_SLOWEST = 0.125  # smallest factor on a step, which halves whenever the step changes sign
_STEP = 1e-3  # of a log precision, for central differences of the log determinant: relative error of a millionth


@dataclass(frozen=True)
class LayerPrecisions:
    """The chosen precisions.

    Args:
        fit: the Gaussian under them.
        precisions: by module, for those that vary.
        gain: in log marginal likelihood over the starting fit, nats.
    """

    fit: LaplaceFit
    precisions: dict[str, float]
    gain: float


def choose_layer_precisions(target: CurvedTarget, start: LaplaceFit, structure: str) -> LayerPrecisions:
    """Maximise the marginal likelihood over one precision per layer, about the mean of `start` with the same H.

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
        """Return lambda_l t_l of each layer, (L,)."""
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
    """Return MacKay's update, log precisions (L,), from P_l, |theta_l|^2 and lambda_l t_l, (L,) each."""
    return _within_bounds((sizes - shares).clamp_min(1e-12) / squares)


def safe_update(sizes: Tensor, squares: Tensor, traces: Tensor) -> Tensor:
    """Return the update that never lowers log Z, log precisions (L,), from P_l, |theta_l|^2 and t_l, (L,) each."""
    return _within_bounds(sizes / (squares + traces))


def _within_bounds(precisions: Tensor) -> Tensor:
    low, high = map(math.log, LAYER_BOUNDS)
    return precisions.log().clamp(low, high)


def _varies(covariance: Covariance, theta: Tensor) -> Tensor:
    """Return one for each parameter that varies and zero for those that a covariance fixes, at theta (P,)."""
    places = varying_places(covariance)
    if places is None:
        return torch.ones_like(theta)
    return torch.zeros_like(theta).index_fill(0, places, 1.0)


def _prior(precisions: dict[str, float], otherwise: float, layout: ParamLayout) -> Prior:
    """Return the prior with modules' precisions by name, and `otherwise` for modules that do not vary."""
    found = {module: precisions.get(module, otherwise) for module in module_places(layout)}
    return Prior.of_parts([found[part.name.rpartition(".")[0]] for part in layout.parts], layout)


STEP = math.log(10) / 2  # of the log precision
_LONGEST = 2 * STEP  # after a successful step: towards stronger priors, whose trials are cheap, or if it gained much
_MUCH = 0.25  # of the NLL
_SHOWN = 8  # initial total of trials in the progress report
_BOUNDS = (math.log(1e-4), math.log(1e6))


@dataclass(frozen=True)
class PriorTrial:
    """A short fit under one prior precision.

    Args:
        precision: of the weights.
        losses: (M,), of the validation examples, nats.
        cost: of the trial, in the unit of PriorClimb's limit.
        limit: cost allowed for all trials while this one is the best.
        found: state that the next trial continues from.
        is_gaussian: whether draws of a Gaussian predicted, instead of those of a fit.
    """

    precision: float
    losses: Tensor
    cost: float
    limit: float
    found: Any = None
    is_gaussian: bool = False

    @property
    def nll(self) -> float:
        """Mean loss, nats per example."""
        return float(self.losses.mean())


@dataclass(frozen=True)
class PriorTrials:
    """The best trial and all trials in order, without their states; is_cut: the cost limit ended the climb."""

    best: PriorTrial
    trials: list[PriorTrial]
    is_cut: bool

    @property
    def curve(self) -> list[list[float]]:
        """Precision and mean loss of all trials, by increasing precision."""
        return sorted([one.precision, one.nll] for one in self.trials)


_SMALLEST_CHANGE = WORSE_SHARE / 2  # of the NLL: less would not change the choice


def losses_if_close(
    target: Target, gaussian: Gaussian, held_out: HeldOut, num_draws: int, generator: torch.Generator
) -> Tensor | None:
    """Return the losses (M,) by draws of a Gaussian if draws of the target would predict the same; else None.

    Close to the target, draws of both predict p and p + cov(p, w), w the log importance weight, to first order.
    """
    theta, log_density = gaussian.from_noise(gaussian.noise(JUDGING_DRAWS, generator))
    weights = target.log_joint(theta) - log_density
    if not float(weights.std()) < CLOSE_LOG_WEIGHT_SD:
        return None
    probabilities = torch.stack([held_out.losses(one) for one in theta.split(1)]).neg().exp()
    mean = probabilities.mean(dim=0)
    change = (weights - weights.mean()) @ probabilities / (len(weights) - 1) / mean
    if not abs(float(change.mean())) < _SMALLEST_CHANGE * float(-mean.log().mean()):
        return None
    return held_out.losses(gaussian.sample(num_draws, generator))


def search_prior(
    try_at: Callable[[float, PriorTrial | None], PriorTrial], first: float, *, progress: Progress = SILENT
) -> PriorTrials:
    """Climb from the precision `first` to larger and then smaller ones, while each predicts better than the last.

    Args:
        try_at: runs the trial under a precision, possibly continuing from another; raises NumericError if impossible.
        progress: advances once per trial.

    Raises:
        NumericError: the first trial fails.
    """
    task = progress.task("prior precision", _SHOWN)
    best = try_at(first, None)
    trials, is_cut = [replace(best, found=None)], False
    for sign in (1, -1):  # trials of stronger priors take less time
        step = STEP
        while not is_cut:
            task.advance(int(len(trials) < _SHOWN), note=f"{best.precision:.3g}")
            log_precision = math.log(best.precision) + sign * step
            if not _BOUNDS[0] <= log_precision <= _BOUNDS[1]:
                break
            is_cut = sum(trial.cost for trial in trials) >= best.limit
            if is_cut:
                break
            found = _try_precision(try_at, math.exp(log_precision), best)
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
    return PriorTrials(best, trials, is_cut)


def _try_precision(
    try_at: Callable[[float, PriorTrial | None], PriorTrial], precision: float, before: PriorTrial
) -> PriorTrial | None:
    """Return the trial, or None if it fails or its losses are not finite."""
    try:
        found = try_at(precision, before)
    except NumericError:
        return None
    return found if math.isfinite(found.nll) else None
