"""Simulation-based calibration: parameters drawn, labels simulated from them, a fit made of those, ranks of the truth among its draws.

If theta comes from the prior, labels from p(y | theta), and draws from p(theta | y), then the rank of f(theta, y) among f of the draws is
uniform, for any f (Cook, Gelman and Rubin 2006; Talts et al. 2018, arXiv:1804.06788; f of the data as well, such as the log
joint: Modrak et al. 2023, arXiv:2211.02383). With theta from the posterior of observed labels, and those kept beside the simulated ones
in every fit, the same holds near the data at hand (Sailynoja et al. 2025, arXiv:2502.03279).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bnncli.inference.refits import Refit
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

LOG_JOINT, LOG_LIKELIHOOD = "log joint", "log likelihood"
_OF_LABELS = {LOG_JOINT: LastLayerTarget.log_joint, LOG_LIKELIHOOD: LastLayerTarget.log_likelihood}
_DRAWN_BYTES = 2**27  # of draws, and of factors, of all that are fitted together
_FLOAT = 8
_MOST_AT_ONCE = 100  # simulations: how often people are told how far it is


@dataclass(frozen=True)
class Problem:
    """What labels are simulated for, and what is known besides them.

    Args:
        features: (N, D) on the device.
        layout: of the head.
        prior: of the target that is fitted; it does not count where the refit has a prior of its own and no log joint is ranked.
        observed: features (M, D) and labels (M,) or (M, C) that every fit sees too; None where theta comes from the prior.
    """

    features: Tensor
    layout: HeadLayout
    prior: Prior
    observed: tuple[Tensor, Tensor] | None = None

    @cached_property
    def _every(self) -> Tensor:
        """Features of all that a fit sees."""
        return self.features if self.observed is None else torch.cat([self.observed[0], self.features])

    def targets(self, theta: Tensor, generator: torch.Generator) -> list[LastLayerTarget]:
        """Targets of labels simulated under each theta (M, P)."""
        found = []
        for one in theta:
            labels = simulated_labels(self.layout, self.features, one, generator)
            if self.observed is not None:
                labels = torch.cat([self.observed[1].to(labels), labels])
            found.append(LastLayerTarget(self._every, labels, self.layout, self.prior))
        return found


@dataclass(frozen=True)
class RankedNumber:
    """What is ranked: a number of theta, or the log joint or the log likelihood of theta and the labels.

    Args:
        name: for people; LOG_JOINT or LOG_LIKELIHOOD without a direction.
        direction: (P,), the number is theta . direction; None for what the labels have a part in.
    """

    name: str
    direction: Tensor | None = None


def quantities(
    layout: HeadLayout,
    held_out: Tensor,
    generator: torch.Generator,
    *,
    of_labels: str = LOG_JOINT,
    num_params: int = 4,
    num_logits: int = 4,
) -> list[RankedNumber]:
    """The log joint or the log likelihood, held-out logits, and a few weights and biases, chosen at random.

    Args:
        held_out: (R, D), inputs whose logits are ranked; of several classes those less their mean.
        of_labels: LOG_JOINT, or LOG_LIKELIHOOD, which needs no density of the prior.
        num_params: weights and biases.
        num_logits: of inputs taken from held_out, each of one output.
    """
    found = [RankedNumber(of_labels)]
    order = torch.randperm(layout.num_params, generator=generator).tolist()
    chosen = order[: max(0, num_params - int(layout.has_bias))]
    if layout.has_bias:
        first = layout.num_params - layout.num_outputs
        chosen.append(first + int(torch.randint(layout.num_outputs, (1,), generator=generator)))
    for place in dict.fromkeys(chosen):
        direction = torch.zeros(layout.num_params, dtype=torch.float64)
        direction[place] = 1.0
        found.append(RankedNumber(_name_of(place, layout), direction))
    for row in torch.randperm(len(held_out), generator=generator)[:num_logits].tolist():
        output = int(torch.randint(layout.num_outputs, (1,), generator=generator))
        found.append(RankedNumber(f"logit {output} of held-out input {row}", _logit(layout, held_out[row], output)))
    return found


def ranks_of(
    problem: Problem,
    thetas: Tensor,
    refit: Refit,
    *,
    ranked: Sequence[RankedNumber],
    num_draws: int,
    generator: torch.Generator,
    progress: Progress = SILENT,
) -> Tensor:
    """Ranks (Q, M), 0..L, of each quantity at theta (M, P), that labels are simulated by, among L draws of the fit to these.

    Equal numbers are put in an order at random.
    """
    ranks = torch.empty(len(ranked), len(thetas), dtype=torch.int64)
    task = progress.task("simulations", len(thetas))
    for rows in _blocks(len(thetas), problem.layout.num_params, num_draws):
        theta = thetas[rows].double().to(problem.features.device)
        targets = problem.targets(theta, generator)
        draws = refit(targets, num_draws, generator, _Within(task, progress)).to(theta)
        every = torch.cat([theta.unsqueeze(1), draws], dim=1)  # (m, 1 + L, P)
        for place, quantity in enumerate(ranked):
            values = _values(quantity, every, targets).cpu()
            below = (values[:, 1:] < values[:, :1]).sum(dim=1)
            equal = (values[:, 1:] == values[:, :1]).sum(dim=1)
            share = torch.rand(len(equal), generator=generator, dtype=torch.float64)
            ranks[place, rows] = below + (share * (equal + 1)).long()
        task.advance(len(targets))
    return ranks


@dataclass(frozen=True)
class _Within:
    """Where the fits of some simulations report: as what the task of all simulations is at."""

    outer: Task
    progress: Progress

    def task(self, name: str, total: int) -> _Step:
        return _Step(self.outer, name, total)

    def warn(self, text: str) -> None:
        self.progress.warn(text)


@dataclass
class _Step:
    outer: Task
    name: str
    total: int
    done: int = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        self.outer.advance(0, f"{self.name} {self.done}/{self.total or '?'}")


def simulated_labels(layout: HeadLayout, features: Tensor, theta: Tensor, generator: torch.Generator) -> Tensor:
    """Labels (N,) int64, or (N, C) uint8 where classes do not exclude each other, drawn given theta (P,) at features (N, D)."""
    likelihood: Likelihood = layout.likelihood
    logits = layout.logits(features.double(), theta.double().unsqueeze(0))[0]
    probabilities = likelihood.class_probabilities(logits, dim=1)
    if not likelihood.is_exclusive:
        unit = torch.rand(probabilities.shape, generator=generator, dtype=torch.float64)
        return (unit.to(probabilities.device) < probabilities).to(torch.uint8)
    unit = torch.rand(probabilities.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(unit)).to(probabilities.device)
    return (likelihood.log_class_probabilities(logits, dim=1) + gumbel).argmax(dim=1)


def _name_of(place: int, layout: HeadLayout) -> str:
    """What people call a place of theta."""
    size = layout.num_outputs * layout.num_features
    if place >= size:
        return f"bias {place - size}"
    return f"weight {place // layout.num_features}, {place % layout.num_features}"


def _values(quantity: RankedNumber, theta: Tensor, targets: Sequence[LastLayerTarget]) -> Tensor:
    """A quantity at theta (m, S, P) of each target, (m, S) float64."""
    if quantity.direction is not None:
        return theta @ quantity.direction.to(theta)
    of_labels = _OF_LABELS[quantity.name]
    return torch.stack([of_labels(target, one) for target, one in zip(targets, theta, strict=True)])


def _logit(layout: HeadLayout, features: Tensor, output: int) -> Tensor:
    """The direction (P,) of one output's logit at features (D,), less the mean over the outputs where only differences matter."""
    likelihood = layout.likelihood
    weights = torch.zeros(layout.num_outputs, dtype=torch.float64)
    weights[output] = 1.0
    if likelihood.is_shift_invariant:
        weights -= 1 / layout.num_outputs
    weight = weights.unsqueeze(1) * features.double().cpu()
    return layout.join(weight, weights if layout.has_bias else None)


def _blocks(num: int, num_params: int, num_draws: int) -> Iterator[slice]:
    """Simulations that are fitted together: their draws and their factors have room."""
    each = _FLOAT * num_params * (num_params + 4 * num_draws)
    size = max(1, min(_MOST_AT_ONCE, _DRAWN_BYTES // each))
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))
