"""Candidates for the prior precision: each has its own exact mode; what the covariance adds may be interpolated.

The criterion is split in two. At the mode alone (validation nll of the point, or minus the log joint) it is computed for
every candidate: a mode costs a few passes over the features when it starts from its neighbours'. What the covariance adds
to that needs the Hessian, whose full form is most of the work, but it varies slowly with the log precision: between
exact fits it is interpolated by the polynomial through the nearest four, and the difference to the polynomial through
three estimates its error. Where that is above the tolerance, the candidate is fitted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bnncli.covariances import Covariance
from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.local_covariance import LocalCovariance, covariance_at
from bnncli.inference.mode import tolerance_factor
from bnncli.inference.modes import mode_of
from bnncli.inference.prior_criterion import Criterion
from bnncli.lazy import torch
from bnncli.progress import Task
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

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
