"""Search for the prior precision: one Laplace fit per candidate, warm-started from its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from bnncli.covariances import Covariance
from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.excess import WORSE_SHARE
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.memory import MAX_FULL_PRECONDITIONER, NUM_DRAWS
from bnncli.inference.mode import LocalCovariance, covariance_at, mode_of, tolerance_factor
from bnncli.inference.prior_criterion import Criterion, Lift, noise_size
from bnncli.inference.sghmc import largest_curvature
from bnncli.lazy import torch
from bnncli.numerics.random import MOST_DIMENSIONS, quasi_normal
from bnncli.posteriors import move, standard_normal
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.target import CurvedTarget, HeldOut

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.layouts import LogitLayout


# Examples times parameters that a candidate's mode, and the draws on val, may take: about 15 and 5 s on two cores.
_MODE_WORK = {"cpu": 1.6e10, "cuda": 1e12}
_VAL_WORK = {"cpu": 1.6e11, "cuda": 1.6e13}
_BRIEF_SHARE = (
    1 / 16
)  # of _MODE_WORK, from which on the weakest priors of the grid, whose modes take the longest, are tried only where they may be the best
_LEAST_BY_OUTPUT = 10  # examples
_LEAST_VAL = 1000
_PAYS = 0.5  # larger parts are all


@dataclass(frozen=True)
class SearchRows:
    """Sorted rows (n,) int64 of train and of val; None where they are all of them."""

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
    """The rows to search by: drawn without replacement, from sizes and the kind of device alone."""
    train = search_size(num_examples, num_params=num_params, num_outputs=num_outputs, device=device)
    val = _size(num_val, max(int(_VAL_WORK[_kind(device)] / (num_params * NUM_DRAWS)), _LEAST_VAL))
    return SearchRows(_some(num_examples, train, generator), _some(num_val, val, generator))


def search_size(num_examples: int, *, num_params: int, num_outputs: int, device: torch.device) -> int:
    """How many training examples a search reads."""
    return _size(num_examples, max(int(_MODE_WORK[_kind(device)] / num_params), _LEAST_BY_OUTPUT * num_outputs))


def is_brief(num_examples: int, *, num_params: int, device: torch.device) -> bool:
    """Whether a search by so many examples leaves out precisions far from the checkpoint's own."""
    return num_examples * num_params > _BRIEF_SHARE * _MODE_WORK[_kind(device)]


def _kind(device: torch.device) -> str:
    return device.type if device.type in _MODE_WORK else "cpu"


def _size(count: int, wanted: int) -> int:
    return count if wanted > _PAYS * count else wanted


def _some(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    return None if wanted == count else torch.randperm(count, generator=generator)[:wanted].sort().values


_MODE_TOLERANCE = 5e-3  # posterior standard deviations: about 1e-5 nats of val nll, 0.05 nats of log determinant
_EXACT_MODE_TOLERANCE = 1e-5  # where nothing is interpolated either
_SAME = 1e-9  # log precisions closer than this are one candidate


@dataclass(frozen=True)
class Candidate:
    """One prior precision, judged.

    Args:
        theta: (P,) float64, the centre.
        at_center: the criterion of the centre alone.
        spread: what the covariance adds; interpolated unless is_exact.
    """

    theta: Tensor
    at_center: float
    spread: float
    is_exact: bool

    @property
    def value(self) -> float:
        """The criterion."""
        return self.at_center + self.spread


@dataclass
class Candidates:
    """The precisions tried so far, by their logarithm; those that could not be fitted are in `failed`.

    Args:
        start: (P,), the checkpoint's.
        tolerance: estimated error up to which an interpolated criterion is accepted; 0 fits all exactly.
        mode_slack: by how much modes may be less exact than is usual.
    """

    target: CurvedTarget
    structure: str
    center: str
    criterion: Criterion
    start: Tensor
    tolerance: float
    task: Task
    mode_slack: float = 1.0
    known: dict[float, Candidate] = field(default_factory=dict)
    failed: set[float] = field(default_factory=set)
    before: LocalCovariance | None = None  # the last that saves work: the examples are those of all candidates
    _hessians: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    _of_center: float | None = None  # the criterion of the one centre, where there is one

    @property
    def values(self) -> dict[float, float]:
        """The criterion by log precision."""
        return {key: candidate.value for key, candidate in self.known.items()}

    @property
    def own_log_precision(self) -> float:
        """The logarithm of the precision under which the start is nearest to a mode: where pull and gradient are one."""
        start = self.start.to(self.target.device).double()
        _, gradient = self.target.log_joint_and_grad(start.unsqueeze(0))
        prior, layout = self.target.prior, self.target.layout
        away = start - prior.center(layout, device=start.device)
        precision = float((gradient[0] - prior.gradient(start, layout)) @ away) / max(float(away @ away), 1e-300)
        return math.log(precision) if precision > 0 else 0.0

    @property
    def best(self) -> float:
        """The log precision of the lowest value."""
        if not self.known:
            raise NumericError("the criterion is not finite for any prior precision", hint="give \0prior_precision\0")
        return min(self.known, key=lambda key: self.known[key].value)

    def by_plug_in(self, task: Task) -> Candidates:
        """The same precisions, judged by their centres alone, which are known."""
        known = {key: replace(one, spread=0.0, is_exact=True) for key, one in self.known.items()}
        criterion = replace(self.criterion, is_plug_in=True)
        return replace(self, criterion=criterion, known=known, failed=set(), task=task, _hessians=dict(self._hessians))

    def judge(self, log_precision: float) -> None:
        """Finds the mode under one precision and the criterion there, unless it is known."""
        self.task.advance(note=f"{math.exp(log_precision):.3g}")
        if any(abs(log_precision - other) < _SAME for other in (*self.known, *self.failed)):
            return
        target = self._target_at(log_precision)
        try:
            theta, log_joint, hessian = self._centered(target, log_precision)
            spread, error = self._interpolated_spread(log_precision)
            at_center = self.criterion.at_center(target, theta, log_joint)
            is_exact = not error <= self.tolerance
            if is_exact:
                found = covariance_at(target, theta, self.structure, hessian=self._fixed_hessian(), before=self.before)
                self._keep(found)
                spread = self.criterion.of(target, theta, log_joint, found.covariance) - at_center
                hessian = found.hessian if self._is_exact or self.center == "checkpoint" else hessian
        except NumericError:  # no mode under this prior: not the best, and no reason to give up the others
            self._fail(log_precision)
            return
        self._add(log_precision, Candidate(theta, at_center, spread, is_exact), hessian)

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judges several; as many together as share work about one centre."""
        size = self.criterion.shared_by(self.target, self.structure) if self.center == "checkpoint" else 0
        if not size:
            for log_precision in log_precisions:
                self.judge(log_precision)
            return
        for start in range(0, len(log_precisions), size):
            self._judge_together(log_precisions[start : start + size])

    def _judge_together(self, log_precisions: Sequence[float]) -> None:
        """Judges several about the start, with one Jacobian of the held-out examples' logits."""
        theta = self.start.to(self.target.device).double()
        covariances: dict[float, Covariance] = {}
        for log_precision in log_precisions:
            self.task.advance(note=f"{math.exp(log_precision):.3g}")
            if any(abs(log_precision - other) < _SAME for other in (*self.known, *self.failed, *covariances)):
                continue
            target = self._target_at(log_precision)
            try:
                found = covariance_at(target, theta, self.structure, hessian=self._fixed_hessian(), before=self.before)
            except NumericError:
                self._fail(log_precision)
                continue
            self._keep(found)
            self._hessians = {log_precision: found.hessian}
            covariances[log_precision] = found.covariance
        if not covariances:
            return
        if self._of_center is None:
            self._of_center = self.criterion.at_center(self.target, theta, math.nan)
        hessian = self._fixed_hessian()
        values = self.criterion.together(self.target, theta, list(covariances.values()))
        for log_precision, value in zip(covariances, values, strict=True):
            self._add(log_precision, Candidate(theta, self._of_center, value - self._of_center, True), hessian)

    def fit(self, log_precision: float) -> LaplaceFit | None:
        """The exact fit of a known candidate, whose value becomes exact; None, and it has failed, where there is none."""
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
        theta = fit.gaussian.mean
        if self._of_center is not None and self.known[log_precision].is_exact:
            return fit  # about the same centre: judged already
        at_center = self.criterion.at_center(target, theta, fit.log_joint)
        whole = self.criterion.of(target, theta, fit.log_joint, fit.gaussian.covariance)
        self._add(log_precision, Candidate(theta, at_center, whole - at_center, True), None)
        for key, candidate in self.known.items():
            if not candidate.is_exact:
                self.known[key] = replace(candidate, spread=self._interpolated_spread(key)[0])
        return fit

    def _add(self, log_precision: float, candidate: Candidate, hessian: dict[str, Tensor] | None) -> None:
        """Takes a candidate in; of the Hessians only the newest and the best's are kept."""
        if not math.isfinite(candidate.value):
            self._fail(log_precision)
            return
        self.known[log_precision] = candidate
        if hessian is not None:
            self._hessians[log_precision] = hessian
        newest = log_precision if hessian is not None else self.best
        self._hessians = {key: kept for key, kept in self._hessians.items() if key in (newest, self.best)}

    @property
    def _is_exact(self) -> bool:
        """Whether the structure is all of the Hessian: nothing whitens the next mode better."""
        return self.target.curvature(self.structure).is_exact

    def _keep(self, found: LocalCovariance | None) -> None:
        """Keeps a covariance for the next where that saves work."""
        if found is not None and found.saves_work:
            self.before = found

    def _fail(self, log_precision: float) -> None:
        self.known.pop(log_precision, None)
        self.failed.add(log_precision)

    def _target_at(self, log_precision: float) -> CurvedTarget:
        """The target under one precision of the weights; a precision that the biases have of their own stays."""
        return self.target.with_prior(self.target.prior.with_weight_precision(math.exp(log_precision)))

    def _centered(self, target: CurvedTarget, log_precision: float) -> tuple[Tensor, float, dict[str, Tensor] | None]:
        """The centre (P,), the log joint there, and the Hessian that led to it."""
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
        polish = self.mode_slack == 1  # steps that end at the tolerance as they are need not be solved so well
        mode = mode_of(target, theta, hessian=hessian, before=self.before, tolerance=tolerance, polish=polish)
        self._keep(mode.before)
        return mode.theta, mode.log_joint, mode.hessian

    def _predicted_mode(self, target: CurvedTarget, log_precision: float) -> Tensor:
        """Where to look for the mode: extrapolated from the nearest two, interpolated from up to four known ones.

        Where there may be many modes, at the start: what neighbours lead to, under a strong prior say, may be another one, or
        a saddle.
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
        """What the covariance adds, from exact candidates around; and its estimated error, inf without enough of them."""
        if self.criterion.is_plug_in:
            return 0.0, 0.0
        exact = [key for key, candidate in self.known.items() if candidate.is_exact]
        is_cheap = self.center == "checkpoint"  # one Hessian serves all
        if is_cheap or len(exact) < 4 or not min(exact) < log_precision < max(exact):
            return math.nan, math.inf
        by_three, by_four = (
            sum(w * self.known[key].spread for w, key in zip(lagrange_weights(near, log_precision), near, strict=True))
            for near in (_nearest(exact, log_precision, size) for size in (3, 4))
        )
        return by_four, abs(by_four - by_three)

    def _nearest_hessian(self, log_precision: float) -> dict[str, Tensor] | None:
        """A neighbour's to whiten with; None where its mode may be another, at which a weaker prior leaves H + Lambda indefinite."""
        if not self._hessians or not self.target.is_concave:
            return None
        return self._hessians[min(self._hessians, key=lambda key: abs(key - log_precision))]

    def _fixed_hessian(self) -> dict[str, Tensor] | None:
        """The Hessian when it is the same for all candidates: at the checkpoint."""
        return next(iter(self._hessians.values()), None) if self.center == "checkpoint" else None


def lagrange_weights(nodes: Sequence[float], at: float) -> list[float]:
    """The weights of values at distinct nodes whose sum is their interpolating polynomial at one point."""
    return [math.prod((at - other) / (node - other) for other in nodes if other != node) for node in nodes]


def _nearest(keys: Sequence[float], to: float, count: int) -> list[float]:
    return sorted(keys, key=lambda key: abs(key - to))[:count]


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


@dataclass(frozen=True)
class StructureChoice:
    """The structure to take.

    Args:
        structure: its name.
        nll: mean validation nll by structure, nats an example, of all that were compared.
    """

    structure: str
    nll: dict[str, float]


def choose_structure(
    target: CurvedTarget, fit: LaplaceFit, structures: Sequence[str], *, judge: Criterion
) -> StructureChoice:
    """The structure of lowest validation nll at the fit's centre, or the first that is near it: see first_near_the_best.

    Args:
        target: the log posterior of the fit, with its prior.
        fit: of the first structure.
        structures: from the one that says most of the posterior to the least; those that cannot be fitted are left out.
        judge: of the validation nll, as the search for the precision has it: the same draws for all.
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
    """The first of losses (M,) by name whose mean is above the lowest by no more than counts.

    That is one standard error of the paired differences, or WORSE_SHARE of the lowest where that is more. A single
    example tells no error.
    """
    best = min(losses, key=lambda name: float(losses[name].mean()))
    lowest = float(losses[best].mean())
    for name, part in losses.items():
        gap = part - losses[best]
        error = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        if float(gap.mean()) <= max(error, WORSE_SHARE * lowest):
            return name
    return best
