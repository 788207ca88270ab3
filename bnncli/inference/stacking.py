"""Last layers refitted in several ways, and the mixture of them that best predicts rows which none of them has seen.

A network may have memorised the rows that it was trained on, and its last layer may be all the better for that, or the worse:
which rows to refit it to, and around which mean, is an open question that validation rows answer. Each way has a prior
precision of its own, chosen by cross-validation over these rows; weights maximise the log score of the mixture there.

Yao, Vehtari, Simpson and Gelman (2018), Using Stacking to Average Bayesian Predictive Distributions, Bayesian Analysis 13(3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnncli.inference.mode import Mode, find_mode
from bnncli.progress import Task
from bnncli.targets.last_layer import LastLayerTarget

_DECADES = (5, 4, 3, 2, 1, 0, -1, -2)  # of precisions, strongest first: each mode starts from the one before
_RISES = 2  # the walk ends where the score has risen so often in a row
_ROUGH, _CLOSE = (
    0.3,
    0.02,
)  # of modes that are compared, and of the chosen ones: posterior standard deviations, all parameters together
_GAP = 1e-6  # nats a row between the weights found and the best
_MOST_STEPS = 20_000
_SMOOTHING = 0.5  # rows that are added for each member, and speak for it alone


@dataclass(frozen=True)
class RefittedHead:
    """One last layer, and what it is in each fold.

    Args:
        name: how it was fitted, for people.
        theta: (P,) float64, of all rows.
        folds: (K, P) float64, each without the rows of one fold.
        precision: of its prior; None without one.
    """

    name: str
    theta: Tensor
    folds: Tensor
    precision: float | None = None


@dataclass
class Way:
    """One way to refit a last layer.

    Args:
        name: for people.
        targets: the log posterior of all rows, then those without the rows of each fold, under a prior of any precision; one alone
            where no fold has rows of it.
        scores: log probabilities of the validation labels, each under the theta (K, P) of its fold, or all under one (1, P).
    """

    name: str
    targets: Sequence[LastLayerTarget]
    scores: Callable[[Tensor], Tensor]
    _modes: list[Mode | None] = field(default_factory=list, init=False, repr=False)

    def fit(self, task: Task, *, precisions: Sequence[float] | None = None) -> RefittedHead:
        """The head of the precision whose folds predict the rows left out best.

        Args:
            task: advances once a mode.
            precisions: to try; by default decades from strong to weak priors, until the score falls, then halves around the best.

        Raises:
            NumericError: no mode was found.
        """
        self._modes = [None] * len(self.targets)
        found: dict[float, float] = {}

        def judge(precision: float) -> float:
            found[precision] = float(self.scores(self._folds(precision, task, _ROUGH)).mean())
            return found[precision]

        if precisions is None:
            best, rises = -math.inf, 0
            for decade in _DECADES:
                score = judge(10.0**decade)
                best, rises = max(best, score), 0 if score >= best else rises + 1
                if rises == _RISES:
                    break
            middle = max(found, key=lambda precision: found[precision])
            precisions = [middle * 10**0.5, middle / 10**0.5]
        for precision in precisions:
            judge(precision)
        chosen = max(found, key=lambda precision: found[precision])
        folds = self._folds(chosen, task, _CLOSE)
        return RefittedHead(self.name, self._mode(0, chosen, task, _CLOSE), folds, chosen)

    def _folds(self, precision: float, task: Task, tolerance: float) -> Tensor:
        """The modes without each fold's rows, (K, P); one row where there are no such rows."""
        places = range(1, len(self.targets)) if len(self.targets) > 1 else [0]
        return torch.stack([self._mode(place, precision, task, tolerance) for place in places])

    def _mode(self, place: int, precision: float, task: Task, tolerance: float) -> Tensor:
        """The mode of a target, from the last one found there or in another fold."""
        target, near = self.targets[place], self._modes[place]
        near = near or next((mode for mode in self._modes if mode is not None), None)
        target = target.with_prior(target.prior.with_weight_precision(precision))
        start = target.prior.center(target.layout, device=target.device) if near is None else near.theta
        hessian = None if near is None else near.hessian
        self._modes[place] = mode = find_mode(target, start, hessian=hessian, tolerance=tolerance)
        task.advance()
        return mode.theta


def stacking_weights(log_scores: Tensor, *, smoothing: float = _SMOOTHING) -> Tensor:
    """Weights (M,) float64 of the mixture with the largest mean log score, within 1e-6 nats a row.

    Args:
        log_scores: (N, M), log probability of each row's label under each member.
        smoothing: rows that are added for each member, and which only it predicts: no weight is zero.
    """
    scores = log_scores.double()
    shares = (scores - scores.amax(dim=1, keepdim=True)).exp()
    count, members = shares.shape
    weights = torch.full((members,), 1 / members, dtype=torch.float64, device=scores.device)
    for _ in range(_MOST_STEPS):
        ratios = (shares / (shares @ weights).unsqueeze(1)).sum(dim=0) + smoothing / weights
        # At the best weights no ratio is above the number of rows; the excess bounds what is missing.
        if float(ratios.max()) - (count + members * smoothing) <= _GAP * count:
            break
        weights = weights * ratios
        weights = weights / weights.sum()
    return weights
