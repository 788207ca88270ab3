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

import torch
from torch import Tensor

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.covariances._row_space import WithinRows
from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian, laplace_evidence
from bnncli.inference.local_covariance import ROUGH_WHITENING, LocalCovariance, covariance_at
from bnncli.inference.mode import find_mode
from bnncli.progress import Task
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.likelihood import block_logits, draw_blocks, row_blocks
from bnncli.targets.row_space import RowSpace
from bnncli.theta.head import HeadLayout

_MODE_TOLERANCE = 5e-3  # posterior standard deviations: about 1e-5 nats of val nll, 0.05 nats of log determinant
_EXACT_MODE_TOLERANCE = 1e-5  # where nothing is interpolated either
_SAME = 1e-9  # log precisions closer than this are one candidate


def predictive_nll(features: Tensor, labels: Tensor, theta: Tensor, layout: HeadLayout) -> float:
    """Mean negative log of the draws' average probability of the label, nats per example; as for predictive_losses."""
    return float(predictive_losses(features, labels, theta, layout).sum()) / features.shape[0]


def predictive_losses(features: Tensor, labels: Tensor, theta: Tensor, layout: HeadLayout) -> Tensor:
    """Negative log (M,) float64 of the draws' average probability of each label, nats.

    Args:
        features: (M, D).
        labels: (M,).
        theta: (S, P), draws.
        layout: how weight and bias lie in theta.
    """
    theta = theta.to(features)
    losses = torch.empty(features.shape[0], dtype=torch.float64, device=features.device)
    for rows in row_blocks(features.shape[0], layout.num_outputs * theta.shape[0], features.device):
        indicators = layout.likelihood.indicators(labels[rows], features.dtype).unsqueeze(1)
        parts = []
        for block in draw_blocks(theta, layout):
            logits = block_logits(features[rows], block, layout)
            label_logits = (logits * indicators).sum(dim=0)
            parts.append(label_logits - layout.likelihood.log_normalizers_(logits))
        losses[rows] = math.log(theta.shape[0]) - torch.cat(parts).double().logsumexp(dim=0)
    return losses


@dataclass(frozen=True)
class Criterion:
    """What is minimised, in two parts: at the centre alone, and what the covariance adds to it.

    Args:
        noise: (S, P), standard normal, common to all candidates: its noise cancels in comparisons.
        validation: features (M, D) and labels (M,) for the validation nll; None for minus the log marginal likelihood.
        rows: the span of the training features that candidates lie in; noise and validation are of all of theta.
    """

    noise: Tensor
    validation: tuple[Tensor, Tensor] | None
    rows: RowSpace | None = None

    def at_center(self, target: LastLayerTarget, theta: Tensor, log_joint: float) -> float:
        """The part of theta (P,) and the log joint there."""
        if self.validation is None:
            return -log_joint - 0.5 * target.layout.num_params * math.log(2 * math.pi)
        return self._nll(target, self._whole(theta).unsqueeze(0))

    def of(self, target: LastLayerTarget, theta: Tensor, log_joint: float, covariance: Covariance) -> float:
        """The whole criterion of N(theta, covariance)."""
        if self.validation is None:
            return -laplace_evidence(log_joint, covariance)
        return float(self.losses(target, theta, covariance).mean())

    def losses(self, target: LastLayerTarget, theta: Tensor, covariance: Covariance) -> Tensor:
        """The validation nll of each example under N(theta, covariance), (M,) float64, where there is validation data."""
        assert self.validation is not None
        layout = target.layout
        if self.rows is not None:
            covariance, layout = WithinRows(covariance, self.rows, target.prior.weight_precision), self.rows.layout
        return predictive_losses(*self.validation, self._whole(theta) + covariance.unwhiten(self.noise), layout)

    def _whole(self, theta: Tensor) -> Tensor:
        """All of theta (P,), of a centre."""
        return theta if self.rows is None else self.rows.lift(theta)

    def _nll(self, target: LastLayerTarget, theta: Tensor) -> float:
        """The validation nll of draws theta (S, P)."""
        assert self.validation is not None
        return predictive_nll(*self.validation, theta, target.layout if self.rows is None else self.rows.layout)


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
        start: (P,), the checkpoint's head.
        tolerance: estimated error up to which an interpolated criterion is accepted; 0 fits all exactly.
    """

    target: LastLayerTarget
    structure: str
    center: str
    criterion: Criterion
    start: Tensor
    tolerance: float
    task: Task
    known: dict[float, Candidate] = field(default_factory=dict)
    failed: set[float] = field(default_factory=set)
    before: LocalCovariance | None = None  # the last that saves work: the examples are those of all candidates
    _hessians: dict[float, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def values(self) -> dict[float, float]:
        """The criterion by log precision."""
        return {key: candidate.value for key, candidate in self.known.items()}

    @property
    def best(self) -> float:
        """The log precision of the lowest value."""
        if not self.known:
            raise NumericError("no prior precision gave a finite criterion", hint="give ‹prior_precision›")
        return min(self.known, key=lambda key: self.known[key].value)

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

    def fit(self, log_precision: float) -> LaplaceFit | None:
        """The exact fit of a known candidate, whose value becomes exact; None, and it has failed, where there is none."""
        target = self._target_at(log_precision)
        try:
            fit = fit_gaussian(
                target,
                start=self.known[log_precision].theta,
                structure=self.structure,
                center=self.center,
                mode_hessian=self._nearest_hessian(log_precision),
                before=self.before,
            )
        except NumericError:
            self._fail(log_precision)
            return None
        theta = fit.gaussian.mean
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
        return bool(registry.load_class("curvature", self.structure).is_exact)

    def _keep(self, found: LocalCovariance | None) -> None:
        """Keeps a covariance for the next where that saves work."""
        if found is not None and found.saves_work:
            self.before = found

    def _fail(self, log_precision: float) -> None:
        self.known.pop(log_precision, None)
        self.failed.add(log_precision)

    def _target_at(self, log_precision: float) -> LastLayerTarget:
        """The target under one precision of the weights; a precision that the biases have of their own stays."""
        return self.target.with_prior(self.target.prior.with_weight_precision(math.exp(log_precision)))

    def _centered(
        self, target: LastLayerTarget, log_precision: float
    ) -> tuple[Tensor, float, dict[str, Tensor] | None]:
        """The centre (P,), the log joint there, and the Hessian that led to it."""
        if self.center == "checkpoint":
            theta = self.start.to(target.device).double()
            return theta, float(target.log_joint(theta.unsqueeze(0))), None
        hessian = self._nearest_hessian(log_precision)
        theta = self._predicted_mode(target, log_precision)
        if hessian is None:
            found = covariance_at(target, theta, ROUGH_WHITENING, before=self.before)
            self._keep(found)
            hessian = found.hessian
        tolerance = _MODE_TOLERANCE if self.tolerance > 0 else _EXACT_MODE_TOLERANCE
        mode = find_mode(target, theta, hessian=hessian, before=self.before, tolerance=tolerance, polish=True)
        self._keep(mode.before)
        return mode.theta, mode.log_joint, mode.hessian

    def _predicted_mode(self, target: LastLayerTarget, log_precision: float) -> Tensor:
        """Where to look for the mode: extrapolated from the nearest two, interpolated from up to four known ones."""
        if not self.known:
            start = self.start.to(target.device).double()
            both = torch.stack([start, torch.zeros_like(start)])
            return both[target.log_joint(both).argmax()]
        is_inside = min(self.known) < log_precision < max(self.known)
        near = _nearest(list(self.known), log_precision, 4 if is_inside else 2)
        weights = lagrange_weights(near, log_precision)
        return torch.stack([w * self.known[key].theta for w, key in zip(weights, near, strict=True)]).sum(dim=0)

    def _interpolated_spread(self, log_precision: float) -> tuple[float, float]:
        """What the covariance adds, from exact candidates around; and its estimated error, inf without enough of them."""
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
        if not self._hessians:
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
