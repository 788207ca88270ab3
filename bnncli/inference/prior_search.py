"""Search for the prior precision: one Laplace fit per candidate, warm-started from its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.recommendation import WORSE_SHARE
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.memory import LEAST_VAL, MAX_FULL_PRECONDITIONER, NUM_DRAWS
from bnncli.inference.mode import LocalCovariance, covariance_at, find_suitable_mode, tolerance_factor
from bnncli.inference.prior_criterion import Criterion, Lift, noise_size
from bnncli.inference.sghmc import largest_curvature
from bnncli.lazy import torch
from bnncli.numerics.random import MOST_DIMENSIONS, quasi_normal
from bnncli.posteriors import move, standard_normal
from bnncli.progress import SILENT, Progress, Task
from bnncli.structures import Covariance
from bnncli.structures.logit_gaussian import keeps_path, make_path
from bnncli.targets.target import CurvedTarget, HeldOut

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.layouts import LogitLayout
    from bnncli.structures.network_logits import CovariancePath


# Limits on examples times parameters for a candidate's mode and for draws on val: about 15 s and 5 s on two cores.
_MODE_WORK = {"cpu": 1.6e10, "cuda": 1e12}
_VAL_WORK = {"cpu": 1.6e11, "cuda": 1.6e13}
_BRIEF_SHARE = 1 / 16  # of _MODE_WORK; above it, a search is also coarser and its modes are less exact
_BRACKET_WORK = (
    1e7  # examples times parameters; above it, weak priors, whose modes take longest, are tried only if needed
)
_LEAST_BY_OUTPUT = 10  # examples
_PAYS = 0.5  # use all rows if the limit leaves more than this share


@dataclass(frozen=True)
class SearchRows:
    """Sorted row indices (n,) int64 of train and of val; None for all rows."""

    train: Tensor | None
    val: Tensor | None


def search_rows(
    num_examples: int,
    num_val: int,
    *,
    num_params: int,
    num_outputs: int,
    device: torch.device,
    generator: torch.Generator,
) -> SearchRows:
    """Draw the rows for a search without replacement; their number depends only on sizes and the kind of device."""
    train = search_size(num_examples, num_params=num_params, num_outputs=num_outputs, device=device)
    val = _size(num_val, max(int(_VAL_WORK[_kind(device)] / (num_params * NUM_DRAWS)), LEAST_VAL))
    return SearchRows(_some(num_examples, train, generator), _some(num_val, val, generator))


def search_size(num_examples: int, *, num_params: int, num_outputs: int, device: torch.device) -> int:
    """Return the number of training examples that a search reads."""
    return _size(num_examples, max(int(_MODE_WORK[_kind(device)] / num_params), _LEAST_BY_OUTPUT * num_outputs))


def is_short_search(num_examples: int, *, num_params: int, device: torch.device) -> bool:
    """Return whether a search with num_examples examples skips precisions far from the checkpoint's own."""
    return num_examples * num_params > _BRIEF_SHARE * _MODE_WORK[_kind(device)]


def _kind(device: torch.device) -> str:
    return device.type if device.type in _MODE_WORK else "cpu"


def _size(count: int, wanted: int) -> int:
    return count if wanted > _PAYS * count else wanted


def _some(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    return None if wanted == count else torch.randperm(count, generator=generator)[:wanted].sort().values


_MODE_TOLERANCE = 5e-3  # posterior standard deviations: about 1e-5 nats of val NLL, 0.05 nats of log determinant
_EXACT_MODE_TOLERANCE = 1e-5  # if nothing is interpolated either
_SAME = 1e-9  # log precisions closer than this are the same candidate


@dataclass(frozen=True)
class Candidate:
    """A prior precision and its criterion.

    Args:
        theta: (P,) float64, the centre.
        at_center: criterion at the centre alone.
        spread: what the covariance adds; interpolated unless is_computed.
    """

    theta: Tensor
    at_center: float
    spread: float
    is_computed: bool

    @property
    def value(self) -> float:
        """The criterion."""
        return self.at_center + self.spread


@dataclass
class Candidates:
    """The candidates so far, by log precision; those that could not be fitted are in `failed`.

    Args:
        start: (P,), the checkpoint's.
        tolerance: largest estimated error of an interpolated criterion; 0 fits all exactly.
        mode_slack: factor on the usual tolerance of modes.
        nodes: log precisions between which a path of covariances about one centre is interpolated.
    """

    target: CurvedTarget
    structure: str
    center: str
    criterion: Criterion
    start: Tensor
    tolerance: float
    task: Task
    mode_slack: float = 1.0
    nodes: Sequence[float] = ()
    known: dict[float, Candidate] = field(default_factory=dict)
    failed: set[float] = field(default_factory=set)
    before: LocalCovariance | None = None  # the last that saves work; all candidates share the examples
    _hessians: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    _of_center: float | None = None  # criterion at the common centre, if there is one
    _path: CovariancePath | None = None

    @property
    def values(self) -> dict[float, float]:
        """Criterion by log precision."""
        return {key: candidate.value for key, candidate in self.known.items()}

    @property
    def own_log_precision(self) -> float:
        """Log precision under which the start is closest to a mode: the prior balances the gradient along it."""
        start = self.start.to(self.target.device).double()
        _, gradient = self.target.log_joint_and_grad(start.unsqueeze(0))
        prior, layout = self.target.prior, self.target.layout
        away = start - prior.center(layout, device=start.device)
        precision = float((gradient[0] - prior.gradient(start, layout)) @ away) / max(float(away @ away), 1e-300)
        return math.log(precision) if precision > 0 else 0.0

    @property
    def best(self) -> float:
        """Log precision of the lowest value."""
        if not self.known:
            raise NumericError("the criterion is not finite for any prior precision", hint="give \0prior_precision\0")
        return min(self.known, key=lambda key: self.known[key].value)

    def by_plug_in(self, task: Task) -> Candidates:
        """Return the same candidates, judged by their known centres only."""
        known = {key: replace(one, spread=0.0, is_computed=True) for key, one in self.known.items()}
        criterion = replace(self.criterion, is_plug_in=True)
        return replace(self, criterion=criterion, known=known, failed=set(), task=task, _hessians=dict(self._hessians))

    def judge(self, log_precision: float) -> None:
        """Find the mode under one precision and the criterion there, unless known."""
        self.task.advance(note=f"{math.exp(log_precision):.3g}")
        if any(abs(log_precision - other) < _SAME for other in (*self.known, *self.failed)):
            return
        target = self._target_at(log_precision)
        try:
            theta, log_joint, hessian = self._centered(target, log_precision)
            spread, error = self._interpolated_spread(log_precision)
            at_center = self.criterion.at_center(target, theta, log_joint)
            is_computed = not error <= self.tolerance
            if is_computed:
                found = covariance_at(target, theta, self.structure, hessian=self._fixed_hessian(), before=self.before)
                self._keep(found)
                spread = self.criterion.of(target, theta, log_joint, found.covariance) - at_center
                hessian = found.hessian if self._has_exact_structure or self.center == "checkpoint" else hessian
        except NumericError:  # no mode under this prior: not the best, but no reason to stop
            self._fail(log_precision)
            return
        self._add(log_precision, Candidate(theta, at_center, spread, is_computed), hessian)

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judge several precisions, together if they share work about one centre."""
        size = self.criterion.shared_by(self.target, self.structure) if self.center == "checkpoint" else 0
        if not size:
            for log_precision in log_precisions:
                self.judge(log_precision)
            return
        if self._path is None and len(self.nodes) <= size:
            self._path = self._find_path()
        for start in range(0, len(log_precisions), size):
            self._judge_together(log_precisions[start : start + size])

    def _find_path(self) -> CovariancePath | None:
        """Return a path of covariances about the start; None if the network caches none, or a covariance does not exist."""
        layout = cast("LogitLayout", self.target.layout)
        if not self.nodes or not keeps_path(layout):
            return None
        found = self._covariances(self.nodes)
        if len(found) < len(self.nodes):
            return None
        return make_path(list(found.values()), self.nodes, layout, self.start.to(self.target.device).double())

    def _judge_together(self, log_precisions: Sequence[float]) -> None:
        """Judge several precisions about the start, with one Jacobian of the held-out logits."""
        theta, new = self.start.to(self.target.device).double(), list[float]()
        for log_precision in log_precisions:
            self.task.advance(note=f"{math.exp(log_precision):.3g}")
            if not any(abs(log_precision - other) < _SAME for other in (*self.known, *self.failed, *new)):
                new.append(log_precision)
        covariances: dict[float, Covariance] = {}
        if self._path is None:
            covariances = self._covariances(new)
            for log_precision in {*new} - {*covariances}:
                self._fail(log_precision)
            new = list(covariances)
        if not new:
            return
        if self._of_center is None:
            self._of_center = self.criterion.at_center(self.target, theta, math.nan)
        if self._path is None:
            values = self.criterion.together(self.target, theta, list(covariances.values()))
        else:
            values = self.criterion.along(self.target, theta, self._path, new)
        hessian = self._fixed_hessian()
        for log_precision, value in zip(new, values, strict=True):
            self._add(log_precision, Candidate(theta, self._of_center, value - self._of_center, True), hessian)

    def _covariances(self, log_precisions: Sequence[float]) -> dict[float, Covariance]:
        """Return the covariances about the start under several precisions, except those that do not exist."""
        theta, covariances = self.start.to(self.target.device).double(), dict[float, Covariance]()
        for log_precision in log_precisions:
            target = self._target_at(log_precision)
            try:
                found = covariance_at(target, theta, self.structure, hessian=self._fixed_hessian(), before=self.before)
            except NumericError:
                continue
            self._keep(found)
            self._hessians = {log_precision: found.hessian}
            covariances[log_precision] = found.covariance
        return covariances

    def fit(self, log_precision: float) -> LaplaceFit | None:
        """Fit a known candidate exactly and update its value; mark it as failed and return None if that is impossible."""
        target = self._target_at(log_precision)
        try:
            fit = fit_gaussian(
                target,
                start=self.known[log_precision].theta,
                structure=self.structure,
                center=self.center,
                hessian=self._fixed_hessian(),
                mode_hessian=self._nearest_hessian(log_precision),
                before=self.before,
            )
        except NumericError:
            self._fail(log_precision)
            return None
        theta, log_joint = fit.gaussian.mean, fit.log_joint
        if self._of_center is not None and self.known[log_precision].is_computed:
            if self._path is not None:
                self._path.put(fit.gaussian.covariance, log_precision)
            return fit  # same centre: already judged
        if math.isnan(log_joint) and self.criterion.held_out is None:
            log_joint = float(target.log_joint(theta.unsqueeze(0)))
        at_center = self.criterion.at_center(target, theta, log_joint)
        whole = self.criterion.of(target, theta, log_joint, fit.gaussian.covariance)
        self._add(log_precision, Candidate(theta, at_center, whole - at_center, True), None)
        for key, candidate in self.known.items():
            if not candidate.is_computed:
                self.known[key] = replace(candidate, spread=self._interpolated_spread(key)[0])
        return fit

    def _add(self, log_precision: float, candidate: Candidate, hessian: dict[str, Tensor] | None) -> None:
        """Add a candidate; only the newest and the best one's Hessians are kept."""
        if not math.isfinite(candidate.value):
            self._fail(log_precision)
            return
        self.known[log_precision] = candidate
        if hessian is not None:
            self._hessians[log_precision] = hessian
        newest = log_precision if hessian is not None else self.best
        self._hessians = {key: kept for key, kept in self._hessians.items() if key in (newest, self.best)}

    @property
    def _has_exact_structure(self) -> bool:
        """Return whether the structure is the whole Hessian, so that no whitening is better for the next mode."""
        return self.target.curvature(self.structure).is_exact

    def _keep(self, found: LocalCovariance | None) -> None:
        """Keep a covariance for the next candidate if that saves work."""
        if found is not None and found.saves_work:
            self.before = found

    def _fail(self, log_precision: float) -> None:
        self.known.pop(log_precision, None)
        self.failed.add(log_precision)

    def _target_at(self, log_precision: float) -> CurvedTarget:
        """Return the target under one precision of the weights; a separate precision of the biases stays."""
        return self.target.with_prior(self.target.prior.with_weight_precision(math.exp(log_precision)))

    def _centered(self, target: CurvedTarget, log_precision: float) -> tuple[Tensor, float, dict[str, Tensor] | None]:
        """Return the centre (P,), the log joint there, and the Hessian that led to it."""
        if self.center == "checkpoint":
            theta = self.start.to(target.device).double()
            is_asked = self.criterion.held_out is None
            return theta, float(target.log_joint(theta.unsqueeze(0))) if is_asked else math.nan, None
        hessian = self._nearest_hessian(log_precision)
        theta = self._predicted_mode(target, log_precision)
        if hessian is None and target.is_concave:
            found = covariance_at(target, theta, target.rough_structure, before=self.before)
            self._keep(found)
            hessian = found.hessian
        tolerance = _MODE_TOLERANCE if self.tolerance > 0 else _EXACT_MODE_TOLERANCE
        tolerance *= tolerance_factor(target.layout.num_params) * self.mode_slack
        polish = self.mode_slack == 1  # modes at a looser tolerance need no polishing
        mode = find_suitable_mode(
            target, theta, hessian=hessian, before=self.before, tolerance=tolerance, polish=polish
        )
        self._keep(mode.before)
        return mode.theta, mode.log_joint, mode.hessian

    def _predicted_mode(self, target: CurvedTarget, log_precision: float) -> Tensor:
        """Return where to start looking for the mode: extrapolated or interpolated from up to four known ones.

        For nonconcave targets, the start: a neighbour may lead to another mode or a saddle.
        """
        start = self.start.to(target.device).double()
        if not target.is_concave:
            return start
        if not self.known:
            both = torch.stack([start, target.prior.center(target.layout, device=target.device)])
            return both[target.log_joint(both).argmax()]
        is_inside = min(self.known) < log_precision < max(self.known)
        near = _nearest(list(self.known), log_precision, 4 if is_inside else 2)
        weights = lagrange_weights(near, log_precision)
        return torch.stack([w * self.known[key].theta for w, key in zip(weights, near, strict=True)]).sum(dim=0)

    def _interpolated_spread(self, log_precision: float) -> tuple[float, float]:
        """Return the interpolated spread from nearby exact candidates, and its estimated error (inf if there are too few)."""
        if self.criterion.is_plug_in:
            return 0.0, 0.0
        exact = [key for key, candidate in self.known.items() if candidate.is_computed]
        is_cheap = self.center == "checkpoint"  # one Hessian serves all
        if is_cheap or len(exact) < 4 or not min(exact) < log_precision < max(exact):
            return math.nan, math.inf
        by_three, by_four = (
            sum(w * self.known[key].spread for w, key in zip(lagrange_weights(near, log_precision), near, strict=True))
            for near in (_nearest(exact, log_precision, size) for size in (3, 4))
        )
        return by_four, abs(by_four - by_three)

    def _nearest_hessian(self, log_precision: float) -> dict[str, Tensor] | None:
        """Return a neighbour's Hessian to whiten with; None if its mode may differ, which may make H + Lambda indefinite."""
        if not self._hessians or not self.target.is_concave:
            return None
        return self._hessians[min(self._hessians, key=lambda key: abs(key - log_precision))]

    def _fixed_hessian(self) -> dict[str, Tensor] | None:
        """Return the Hessian if it is common to all candidates, at the checkpoint."""
        return next(iter(self._hessians.values()), None) if self.center == "checkpoint" else None


def lagrange_weights(nodes: Sequence[float], at: float) -> list[float]:
    """Return the Lagrange weights of values at distinct nodes for interpolation at one point."""
    return [math.prod((at - other) / (node - other) for other in nodes if other != node) for node in nodes]


def _nearest(keys: Sequence[float], to: float, count: int) -> list[float]:
    return sorted(keys, key=lambda key: abs(key - to))[:count]


CRITERIA = ("val", "loo", "marglik")
SAMPLED, PLUG_IN = "mc", "plug-in"
BOUNDS = (1e-2, 1e5)  # of the grid
# Tolerances of interpolated criteria: nats per example, nats. They move the choice by about a percent.
TOLERANCES = {"val": 5e-5, "loo": 5e-5, "marglik": 0.1}
# Factor on the mode tolerance for large heads; changes the loss of one val example by about 1e-4 nats.
LARGE_SLACK = 10.0
Fit = TypeVar("Fit", covariant=True)
_LIMIT = 100.0
_LEAST_SHARE = WORSE_SHARE / 2  # of the criterion, that the mode alone must gain to be searched for
_NEAR = math.log(10) / 4  # between log precisions whose neighbours the search has judged
_LEAST_GAIN = 5e-5  # of the criterion, for one more pass over the examples
_HALVINGS = 3  # the last step is an eighth of a decade; the parabola does the rest
_LARGE_HALVINGS = 1  # for large heads, whose candidates take half a minute each


class SearchedPrecisions(Protocol[Fit]):
    """The candidates of a search, by log precision: of one target, as Candidates, or of several together."""

    @property
    def target(self) -> CurvedTarget:
        """The target, or one of them."""

    @property
    def values(self) -> dict[float, float]:
        """Criterion by log precision."""

    @property
    def own_log_precision(self) -> float:
        """Return the log precision to begin at."""

    @property
    def best(self) -> float:
        """Log precision of the lowest value."""

    def judge(self, log_precision: float) -> None:
        """Compute the criterion under one precision, unless known."""

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judge several precisions."""

    def fit(self, log_precision: float) -> Fit | None:
        """Fit a known candidate exactly and update its value; None if that is impossible."""


@dataclass(frozen=True)
class PlugInChoice:
    """The prior precision whose mode alone predicts val best: regularised maximum likelihood, without averaging.

    Args:
        precision: of the weights.
        curve: all (prior precision, mean validation NLL of its mode in nats per example), by increasing precision.
        theta: (P,) float64, the mode.
        at_edge: as in PriorSearch.
    """

    precision: float
    curve: list[tuple[float, float]]
    theta: Tensor
    at_edge: bool


@dataclass(frozen=True)
class PriorSearch:
    """The result of a search.

    Args:
        best: the chosen prior precision.
        curve: all fitted (prior precision, criterion), by increasing precision; lower is better: mean validation NLL in
            nats per example, or minus the log marginal likelihood in nats. Exact at the best; near it, some may be
            interpolated within the tolerance.
        at_edge: whether the best is at an end of the grid beyond which a better one may exist; the strongest prior
            about a mean is not such an end.
        criterion: val, loo or marglik.
        compared_at: centres of the candidates: mode, or checkpoint.
        structure: of the candidates.
        fit: the Gaussian at the best precision.
        judge: the criterion, to compare other Gaussians with those of the search.
        plug_in: best precision for the centre alone, if it predicts better than the best Gaussian.
        integrator: SAMPLED or PLUG_IN: which predictions the curve and the choice refer to.
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
    """Search for the prior precision within bounds that minimises the criterion, to about 5% (coarser for large heads).

    Args:
        target: the log posterior; its own precision of the weights, and a dependent one of the biases, is ignored.
        start: (P,), the checkpoint's.
        generator: random generator of the predictive draws.
        structure, center: of the compared Gaussians. For a concave target, marglik is estimated at the modes regardless
            of center, which then applies to the final fit. For other targets each prior has other modes, and the
            network as trained is none of them: with center checkpoint, marglik is estimated about the start (Immer et
            al. 2021, arXiv:2104.04975). Above MAX_FULL_PRECONDITIONER parameters, a mode per candidate is too
            expensive: candidates are compared about the start, and the final fit moves to its mode.
        criterion: val, loo or marglik.
        held_out: validation data, for val; a LeftOut of the target for loo.
        bounds: lowest and highest precision of the grid. About a nonzero mean the grid extends to where the posterior
            equals that mean and stronger priors make no difference.
        tolerance: of an interpolated criterion, in its unit; TOLERANCES by default, 0 for no interpolation.
        lift: to all of theta, if the target covers a part of it and validation data need the rest.
        is_large: for a head whose draws of theta would take long: draw logits of val instead, find modes only as
            accurately as val needs, and try precisions outwards from the checkpoint's own until the criterion rises.
        progress: advances once per candidate.

    Raises:
        UsageError: the criterion is val without validation data.
        NumericError: no candidate could be fitted.
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
    grid = precision_grid(target, bounds, generator)
    candidates = Candidates(
        target,
        structure,
        _find_center(target, criterion, center),
        make_criterion(target, structure, held_out, lift, generator, by_logits=is_large or criterion == "loo"),
        start,
        TOLERANCES[criterion] if tolerance is None else tolerance,
        progress.task("prior precision", num_candidates(grid)),
        mode_slack=LARGE_SLACK if is_large else 1.0,
        nodes=_path_nodes(grid),
    )
    pace = choose_pace(target, is_large=is_large, shares_center=candidates.center == "checkpoint")
    fit = search_lowest_fit(candidates, grid, pace)
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
        plug_in=_best_plug_in(candidates, grid, pace, progress) if criterion == "val" else None,
    )


def _best_plug_in(candidates: Candidates, grid: list[float], pace: Pace, progress: Progress) -> PlugInChoice | None:
    """Return the best precision for the centre alone; None if none predicts val better than the best Gaussian.

    None as well if the best centre so far is near that of the best Gaussian, between others, and gains less than matters.

    If few rows leave the posterior far from Gaussian, draws of the Gaussian need a prior much too strong for its mode:
    on 397 digits 10 instead of .3, with val NLL .44 instead of .14.
    """
    if candidates.center != "mode" or not candidates.target.is_concave:
        return None
    lowest = candidates.known[candidates.best].value
    centers = candidates.by_plug_in(progress.task("prior precision of the mode", num_candidates(grid)))
    gain = lowest - centers.known[centers.best].value
    is_inside = min(centers.known) < centers.best < max(centers.known)
    if gain <= 0 or (abs(centers.best - candidates.best) < _NEAR and is_inside and gain < _LEAST_SHARE * lowest):
        return None
    judge_precisions(centers, grid, pace)
    best = centers.best
    at_edge = is_at_edge(best, grid, candidates.target)
    return PlugInChoice(math.exp(best), _curve(centers), centers.known[best].theta, at_edge)


def _curve(candidates: Candidates) -> list[tuple[float, float]]:
    return [(math.exp(key), value) for key, value in sorted(candidates.values.items())]


def precision_grid(target: CurvedTarget, bounds: tuple[float, float], generator: torch.Generator) -> list[float]:
    """Return the log precisions to search first; for a prior about a mean, up to where the posterior equals that mean."""
    if target.prior.mean is not None:
        bounds = (bounds[0], max(bounds[1], _limit(target, generator)))
    return _grid(*bounds)


def _path_nodes(grid: list[float]) -> list[float]:
    """Return log precisions at half the distance of the grid, so that covariances in between err by less than 1%."""
    return sorted([*grid, *((one + other) / 2 for one, other in pairwise(grid))])


def num_candidates(grid: list[float]) -> int:
    """Return how many precisions a search of a grid judges."""
    return len(grid) + 2 * _HALVINGS + 2


def is_at_edge(best: float, grid: list[float], target: CurvedTarget) -> bool:
    """Return whether the best log precision is at an end of the grid beyond which there are others."""
    return best - grid[0] < 1e-9 or (grid[-1] - best < 1e-9 and target.prior.mean is None)


def _limit(target: CurvedTarget, generator: torch.Generator) -> float:
    """Return a precision at which the posterior is the prior's mean: 100 times the largest curvature of the likelihood.

    The mode is then within a hundredth of a Newton step of the mean, in every direction.
    """
    mean = target.prior.center(target.layout, device=target.device)
    return _LIMIT * largest_curvature(target.with_prior(replace(target.prior, weight_precision=1e-6)), mean, generator)


def make_criterion(
    target: CurvedTarget,
    structure: str,
    held_out: HeldOut | None,
    lift: Lift | None,
    generator: torch.Generator,
    *,
    by_logits: bool,
) -> Criterion:
    """Return the criterion on the validation data, or the marginal likelihood without any; all candidates share the noise.

    Normals for logits are Sobol points, which have smaller errors. Normals for theta are antithetic, so their mean is
    exact.
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


def _find_center(target: CurvedTarget, criterion: str, center: str) -> str:
    """Return where candidates are centred."""
    if target.is_concave:
        return "mode" if criterion == "marglik" else center
    return center if target.layout.num_params <= MAX_FULL_PRECONDITIONER else "checkpoint"


@dataclass(frozen=True)
class Pace:
    """How thorough a search is.

    Args:
        is_bracketed: judge grid points outwards from the checkpoint's own precision only until the criterion rises.
        num_halvings: of the step around the lowest point.
        is_together: judge all points around the lowest one at once, since candidates share their work.
    """

    is_bracketed: bool
    num_halvings: int
    is_together: bool = False


def choose_pace(target: CurvedTarget, *, is_large: bool, shares_center: bool = False) -> Pace:
    """Return the pace of a search: the whole grid where that takes about a second, or one Hessian serves all points."""
    is_slow = target.num_examples * target.layout.num_params > _BRACKET_WORK
    is_bracketed = is_large or (is_slow and target.is_concave and not shares_center)
    is_together = shares_center and not target.is_concave
    return Pace(is_bracketed, _LARGE_HALVINGS if is_large else _HALVINGS, is_together)


def search_lowest_fit(candidates: SearchedPrecisions[Fit], grid: list[float], pace: Pace) -> Fit:
    """Return the exact fit at the lowest point that `judge_precisions` finds."""
    judge_precisions(candidates, grid, pace)
    while True:
        best = candidates.best
        fit = candidates.fit(best)
        if fit is not None and candidates.best == best:
            return fit


def judge_precisions(candidates: SearchedPrecisions[Any], grid: list[float], pace: Pace) -> None:
    """Judge precisions: the grid or part of it, then successively smaller steps around its lowest point."""
    if pace.is_bracketed:
        _bracket(candidates, grid)
        if candidates.target.prior.mean is not None:
            candidates.judge(grid[-1])
    else:
        candidates.judge_all(list(reversed(grid)))
    step = grid[1] - grid[0] if len(grid) > 1 else 0.0
    if step and pace.is_together:
        around = [candidates.best + step * quarter / 4 for quarter in range(-3, 4)]
        candidates.judge_all([key for key in around if grid[0] <= key <= grid[-1]])
    for _ in range(pace.num_halvings if step and not pace.is_together else 0):
        step /= 2
        middle = candidates.best
        candidates.judge_all([max(middle - step, grid[0]), min(middle + step, grid[-1])])
    if step:
        vertex, gain = _parabola_vertex(candidates.values, candidates.best)
        if not pace.is_together or gain > _LEAST_GAIN:
            candidates.judge_all([vertex])


def _bracket(candidates: SearchedPrecisions[Any], grid: list[float]) -> None:
    """Judge grid points outwards from the checkpoint's own precision, in both directions, until the criterion rises."""
    own = candidates.own_log_precision
    first = min(range(len(grid)), key=lambda i: abs(grid[i] - own))
    candidates.judge(grid[first])
    for step in (1, -1):  # modes of stronger priors are found sooner
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
    """Fit at a log precision with another centre than the candidates'."""
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
    """Return log precisions from lowest to highest, about a decade apart."""
    if not 0 < lowest <= highest:
        raise ValueError(f"bounds: expected 0 < lowest <= highest, got {lowest}, {highest}")
    steps = max(1, round(math.log10(highest / lowest)))
    if lowest == highest:
        return [math.log(lowest)]
    return [math.log(lowest) + i * math.log(highest / lowest) / steps for i in range(steps + 1)]


def _parabola_vertex(values: dict[float, float], best: float) -> tuple[float, float]:
    """Return the vertex of the parabola through the best point and its two neighbours, and how much lower it is.

    At an end it is the best point itself.
    """
    keys = sorted(values)
    place = keys.index(best)
    if place in (0, len(keys) - 1):
        return best, 0.0
    left, right = keys[place - 1], keys[place + 1]
    a, b = best - left, best - right
    rise_left, rise_right = values[best] - values[left], values[best] - values[right]
    bend = a * rise_right - b * rise_left
    if not math.isfinite(bend) or bend == 0:
        return best, 0.0
    slope = a * a * rise_right - b * b * rise_left
    gain = abs(slope * slope / (4 * bend * a * b * (b - a)))
    return min(max(best - 0.5 * slope / bend, left), right), gain


@dataclass(frozen=True)
class StructureChoice:
    """The structure to use.

    Args:
        structure: its name.
        nll: mean validation NLL of each compared structure, nats per example.
    """

    structure: str
    nll: dict[str, float]


def choose_structure(
    target: CurvedTarget, fit: LaplaceFit, structures: Sequence[str], *, judge: Criterion
) -> StructureChoice:
    """Choose the structure with the lowest validation NLL at the fit's centre, or the first close to it.

    See first_near_the_best.

    Args:
        target: the log posterior of the fit, with its prior.
        fit: of the first structure.
        structures: most to least expressive; those that cannot be fitted are skipped.
        judge: the validation NLL of the precision search, with the same draws for all.
    """
    theta, losses = fit.gaussian.mean, {}
    for structure in structures:
        try:
            is_known = structure == fit.gaussian.covariance.structure
            covariance = fit.gaussian.covariance if is_known else covariance_at(target, theta, structure)[0]
        except NumericError:
            continue
        found = judge.losses(target, theta, covariance)
        if math.isfinite(float(found.mean())):
            losses[structure] = found
    return StructureChoice(first_near_the_best(losses), {name: float(part.mean()) for name, part in losses.items()})


def first_near_the_best(losses: dict[str, Tensor]) -> str:
    """Return the first name whose losses (M,) have a mean not significantly above the lowest.

    Significant means more than one standard error of the paired differences, or WORSE_SHARE of the lowest if larger. A
    single example has no standard error.
    """
    best = min(losses, key=lambda name: float(losses[name].mean()))
    lowest = float(losses[best].mean())
    for name, part in losses.items():
        gap = part - losses[best]
        error = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        if float(gap.mean()) <= max(error, WORSE_SHARE * lowest):
            return name
    return best
