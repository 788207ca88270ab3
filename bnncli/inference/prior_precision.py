"""The prior precision that predicts best: one Laplace fit for each candidate, warm-started from its neighbours.

Three criteria: the validation split's negative log likelihood under the Gaussian's Monte Carlo predictive, that of the linearised
network where it is not linear in theta; the same of each training example left out of a last layer's; or Laplace's marginal likelihood. A grid of whole decades finds the valley, halved steps and a parabola in log precision its floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from bnncli.errors import UsageError
from bnncli.inference.costs import NUM_DRAWS
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.linearised import noise_size
from bnncli.inference.memory import MAX_FULL_PRECONDITIONER
from bnncli.inference.prior_candidates import Candidates
from bnncli.inference.prior_criterion import Criterion, Lift
from bnncli.inference.stiffness import largest_curvature
from bnncli.lazy import torch
from bnncli.numerics.sobol import MOST_DIMENSIONS, quasi_normal
from bnncli.posteriors import move, standard_normal
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import CurvedTarget, HeldOut

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.theta.layout import LogitLayout

CRITERIA = ("val", "loo", "marglik")
SAMPLED, PLUG_IN = "mc", "plug-in"
BOUNDS = (1e-2, 1e5)  # of the grid
# Of the criterion where it is interpolated: nats per example, nats. The choice moves by a percent or so.
TOLERANCES = {"val": 5e-5, "loo": 5e-5, "marglik": 0.1}
# By how much the tolerance of a large head's modes is larger: of one val example's loss, 1e-4 nats or so.
LARGE_SLACK = 10.0
Fit = TypeVar("Fit", covariant=True)
_LIMIT = 100.0
_HALVINGS = 3  # the last step is an eighth of a decade; the parabola does the rest
_LARGE_HALVINGS = 1  # of large heads, whose candidates take half a minute each


class SearchedPrecisions(Protocol[Fit]):
    """The precisions that a search has tried, by their logarithm, as Candidates are: of one target, or of several together."""

    @property
    def target(self) -> CurvedTarget:
        """The target, or one of them."""

    @property
    def values(self) -> dict[float, float]:
        """The criterion by log precision."""

    @property
    def own_log_precision(self) -> float:
        """Where to begin."""

    @property
    def best(self) -> float:
        """The log precision of the lowest value."""

    def judge(self, log_precision: float) -> None:
        """Finds the criterion under one precision, unless it is known."""

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judges several."""

    def fit(self, log_precision: float) -> Fit | None:
        """The exact fit of a known candidate, whose value becomes exact; None where there is none."""


@dataclass(frozen=True)
class PlugInChoice:
    """The prior precision whose mode predicts val best by itself: regularised maximum likelihood, without averaging.

    Args:
        precision: of the weights.
        curve: every (prior precision, mean validation nll of its mode in nats an example), in increasing order of precision.
        theta: (P,) float64, the mode.
        at_edge: as of PriorSearch.
    """

    precision: float
    curve: list[tuple[float, float]]
    theta: Tensor
    at_edge: bool


@dataclass(frozen=True)
class PriorSearch:
    """The outcome of a search.

    Args:
        best: the chosen prior precision.
        curve: every (prior precision, criterion) that could be fitted, in increasing order of precision; lower is better: mean
            validation nll in nats per example, or minus the log marginal likelihood in nats. Exact, but for those
            precisions near the best whose criterion could be interpolated to the tolerance; exact at the best.
        at_edge: whether the best lies at an end of the grid, where a wider one might do better: not at the strongest of
            priors about a mean.
        criterion: val, loo or marglik.
        compared_at: the candidates' centres: mode, or checkpoint.
        structure: of the candidates.
        fit: the Gaussian at the best precision.
        judge: the criterion as a function of Gaussians, to compare others with those of the search.
        plug_in: the best precision for the centre alone, where it predicts better than the best Gaussian does.
        integrator: of whose predictions the curve is, and for which the precision was chosen: SAMPLED or PLUG_IN.
    """

    best: float
    curve: list[tuple[float, float]]
    at_edge: bool
    criterion: str
    compared_at: str
    structure: str
    fit: LaplaceFit
    judge: Criterion
    plug_in: PlugInChoice | None = None
    integrator: str = SAMPLED


def search(
    target: CurvedTarget,
    *,
    start: Tensor,
    generator: torch.Generator,
    structure: str = "full",
    center: str = "mode",
    criterion: str = "val",
    held_out: HeldOut | None = None,
    bounds: tuple[float, float] = BOUNDS,
    tolerance: float | None = None,
    lift: Lift | None = None,
    is_large: bool = False,
    progress: Progress = SILENT,
) -> PriorSearch:
    """The prior precision within bounds that minimises the criterion, to about 5 %; of large heads by a coarser grid.

    Args:
        target: the log posterior; its own precision of the weights is ignored, and the biases' where that follows.
        start: (P,), the checkpoint's.
        generator: of the draws of the predictive.
        structure, center: of the Gaussians compared. The marginal likelihood of a concave target is its own, wherever a Gaussian
            is centred: with marglik it is estimated at the modes, and the fit at the best precision has the centre. Of another
            target it is that about the start (Immer et al. 2021, arXiv:2104.04975), where that is the centre: each prior has
            other modes, and the network as trained is none of them. Where such a target has more parameters than
            MAX_FULL_PRECONDITIONER, a mode for each candidate is too dear: they are compared about the start, and the fit at the
            best precision moves to its mode.
        criterion: val, loo or marglik.
        held_out: the validation data, for val; a LeftOut of the target for loo.
        bounds: lowest and highest precision of the grid; about a mean other than zero it goes on to where the posterior is that
            mean, and no stronger prior is another.
        tolerance: of the criterion, in its unit, where it is interpolated; TOLERANCES by default, 0 for none of that.
        lift: to all of theta, where the target knows a part of it: validation data may ask for more.
        is_large: of a head whose draws of theta would take long: draws are of val's logits, modes are found as
            nearly as val tells, and of the grid only precisions about the checkpoint's own are tried, until the criterion rises.
        progress: advanced once a candidate.

    Raises:
        UsageError: when val is asked for without validation data.
        NumericError: when no candidate could be fitted.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion: expected one of {', '.join(CRITERIA)}; got {criterion!r}")
    if criterion == "marglik":
        held_out = None
    elif criterion == "val" and held_out is None:
        raise UsageError(
            "tuning the prior precision on validation data needs a labelled val split",
            hint="extract one (\0hold_out\0 val=test:2000), set \0prior_precision\0, or tune with marglik",
        )
    grid = grid_of(target, bounds, generator)
    candidates = Candidates(
        target,
        structure,
        _compared_at(target, criterion, center),
        criterion_of(target, structure, held_out, lift, generator, by_logits=is_large or criterion == "loo"),
        start,
        TOLERANCES[criterion] if tolerance is None else tolerance,
        progress.task("prior precision", num_judged(grid)),
        mode_slack=LARGE_SLACK if is_large else 1.0,
    )
    fit = descend(candidates, grid, is_brief=is_large)
    best = candidates.best
    if center != candidates.center:
        fit = _fit_at(candidates, best, center, progress)
    return PriorSearch(
        best=math.exp(best),
        curve=_curve(candidates),
        at_edge=is_at_edge(best, grid, target),
        criterion=criterion,
        compared_at=candidates.center,
        structure=structure,
        fit=fit,
        judge=candidates.criterion,
        plug_in=_best_plug_in(candidates, grid, is_brief=is_large, progress=progress) if criterion == "val" else None,
    )


def _best_plug_in(
    candidates: Candidates, grid: list[float], *, is_brief: bool, progress: Progress
) -> PlugInChoice | None:
    """The best precision for the centre alone; None where no centre that is known predicts better than the best Gaussian.

    Where few rows leave a posterior that is far from Gaussian, draws of the Gaussian need a prior that is much too strong for its
    mode: on 397 digits 10 in place of .3, and val NLL is .44 in place of .14.
    """
    if candidates.center != "mode" or not candidates.target.is_concave:
        return None
    lowest = candidates.known[candidates.best].value
    centers = candidates.by_plug_in(progress.task("prior precision of the mode", num_judged(grid)))
    if not centers.known[centers.best].value < lowest:
        return None
    approach(centers, grid, is_brief=is_brief)
    best = centers.best
    at_edge = is_at_edge(best, grid, candidates.target)
    return PlugInChoice(math.exp(best), _curve(centers), centers.known[best].theta, at_edge)


def _curve(candidates: Candidates) -> list[tuple[float, float]]:
    return [(math.exp(key), value) for key, value in sorted(candidates.values.items())]


def grid_of(target: CurvedTarget, bounds: tuple[float, float], generator: torch.Generator) -> list[float]:
    """The log precisions to search first; of a prior about a mean up to where the posterior is that mean."""
    if target.prior.mean is not None:
        bounds = (bounds[0], max(bounds[1], _limit(target, generator)))
    return _grid(*bounds)


def num_judged(grid: list[float]) -> int:
    """How many precisions a search of a grid judges."""
    return len(grid) + 2 * _HALVINGS + 2


def is_at_edge(best: float, grid: list[float], target: CurvedTarget) -> bool:
    """Whether the best log precision lies at an end of the grid beyond which there are others."""
    return best - grid[0] < 1e-9 or (grid[-1] - best < 1e-9 and target.prior.mean is None)


def _limit(target: CurvedTarget, generator: torch.Generator) -> float:
    """A precision under which the posterior is the prior's mean: a hundred times the largest curvature of the likelihood there.

    The mode is a hundredth of a Newton step from it along the stiffest direction, and nearer along all others.
    """
    mean = target.prior.center(target.layout, device=target.device)
    return _LIMIT * largest_curvature(target.with_prior(replace(target.prior, weight_precision=1e-6)), mean, generator)


def criterion_of(
    target: CurvedTarget,
    structure: str,
    held_out: HeldOut | None,
    lift: Lift | None,
    generator: torch.Generator,
    *,
    by_logits: bool,
) -> Criterion:
    """That of the validation data, or the marginal likelihood where there are none; its draws have the same noise for all.

    Normals of logits are Sobol points, which err less. Those of theta come with their negatives, so that their mean is exact.
    """
    layout = target.layout if lift is None else lift.layout
    by_logits = by_logits and held_out is not None and lift is None
    size = layout.num_params
    if by_logits:
        size = cast("LogitLayout", layout).num_outputs
    elif held_out is not None and held_out.is_linearised:
        size = noise_size(layout, structure, NUM_DRAWS)
    if held_out is not None and size < layout.num_params and size <= MOST_DIMENSIONS:
        noise = move(quasi_normal(NUM_DRAWS, size, generator), target.device)
    else:
        half = standard_normal(NUM_DRAWS // 2, size, generator, target.device)
        noise = torch.cat([half, -half])
    return Criterion(noise, held_out, lift, by_logits)


def _compared_at(target: CurvedTarget, criterion: str, center: str) -> str:
    """Where candidates are centred."""
    if target.is_concave:
        return "mode" if criterion == "marglik" else center
    return center if target.layout.num_params <= MAX_FULL_PRECONDITIONER else "checkpoint"


def descend(candidates: SearchedPrecisions[Fit], grid: list[float], *, is_brief: bool) -> Fit:
    """The exact fit at the lowest point that `approach` finds."""
    approach(candidates, grid, is_brief=is_brief)
    while True:
        best = candidates.best
        fit = candidates.fit(best)
        if fit is not None and candidates.best == best:
            return fit


def approach(candidates: SearchedPrecisions[Any], grid: list[float], *, is_brief: bool) -> None:
    """Judge precisions: the whole grid, then ever smaller steps around its lowest point."""
    if is_brief:
        _bracket(candidates, grid)
        if candidates.target.prior.mean is not None:
            candidates.judge(grid[-1])
    else:
        candidates.judge_all(list(reversed(grid)))
    step = grid[1] - grid[0] if len(grid) > 1 else 0.0
    for _ in range((_LARGE_HALVINGS if is_brief else _HALVINGS) if step else 0):
        step /= 2
        middle = candidates.best
        candidates.judge_all([max(middle - step, grid[0]), min(middle + step, grid[-1])])
    if step:
        candidates.judge_all([_parabola_vertex(candidates.values, candidates.best)])


def _bracket(candidates: SearchedPrecisions[Any], grid: list[float]) -> None:
    """Judges points of the grid from the checkpoint's own on, stronger ones and weaker ones, until the criterion rises."""
    own = candidates.own_log_precision
    first = min(range(len(grid)), key=lambda i: abs(grid[i] - own))
    candidates.judge(grid[first])
    for step in (1, -1):  # a stronger prior's mode is found sooner
        lowest = candidates.values.get(grid[first], math.inf)
        for key in grid[first + step :: step] if first + step >= 0 else []:
            candidates.judge(key)
            value = candidates.values.get(key, math.inf)
            if value >= lowest and candidates.values:
                break
            lowest = value
        if lowest < candidates.values.get(grid[first], math.inf):
            return


def _fit_at(candidates: Candidates, key: float, center: str, progress: Progress) -> LaplaceFit:
    """The fit at a log precision with another centre than the candidates'."""
    target = candidates.target
    return fit_gaussian(
        target.with_prior(target.prior.with_weight_precision(math.exp(key))),
        start=candidates.start,
        structure=candidates.structure,
        center=center,
        before=candidates.before,
        progress=progress,
    )


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
