"""SWAG: a Gaussian made of the iterates of SGD at a constant learning rate.

Maddox et al. (2019), arXiv:1902.02476: after a warm-up the iterate at the end of every epoch goes into a running mean and variance, and its
deviation from the running mean into the last R columns. Steps go down the mean loss, the prior's part of it included.

Its spread is whatever the learning rate makes it. The default rate is that at which the stationary distribution of SGD is nearest to
the posterior in Kullback-Leibler divergence, where curvature and gradient noise are alike (Mandt, Hoffman and Blei 2017, arXiv:1704.04289,
section 4.1): l / (1 - momentum) = 2 B P / (N tr C), C the covariance of one example's gradient. That takes noise for fresh in every
step; that of shuffled batches cancels over an epoch, at whose end iterates are taken, so that the spread comes out smaller. `tamed` halves it where steps run away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.covariances.swag import Swag
from bnncli.errors import NumericError
from bnncli.inference.refine import TargetLearner
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import on_device
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import CurvedTarget
from bnncli.training.loop import Course, Save, State, num_batches, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor

_PILOT_EPOCHS = 5  # that a learning rate is tried for
_MOST_HALVINGS = 20
_NOISE_BATCHES = 64  # whose gradients tell tr C
LEAST_SHARE = 1e-10  # of the prior's variance: what a parameter that does not move gets, for it must have some


@dataclass(frozen=True)
class SwagPlan:
    """How iterates are made, and which are taken.

    Args:
        warmup: epochs before any is taken.
        epochs: after it, an iterate each.
        rank: deviations kept, R, the last ones.
        batch_size: examples a step.
        learning_rate: for the mean loss.
        momentum: share of it that a step keeps.
        scale: s, on the whole covariance.
    """

    warmup: int
    epochs: int
    rank: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.9
    scale: float = 1.0


@dataclass(frozen=True)
class SwagFit:
    """What it returns.

    Args:
        gaussian: over theta.
        history: (E,), mean estimate of the log joint in each epoch, nats.
        num_still: parameters that did not move, whose variance is LEAST_SHARE of the prior's.
    """

    gaussian: Gaussian
    history: Tensor
    num_still: int


def fit_swag(
    target: CurvedTarget,
    plan: SwagPlan,
    *,
    start: Tensor,
    generator: torch.Generator,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> SwagFit:
    """The Gaussian of SGD's iterates from start (P,).

    Args:
        generator: of the shuffles.
        state, save: to resume, as in bnncli.training.loop.train.
        progress: advanced once a step.

    Raises:
        NumericError: the log joint is not finite.
    """
    iterates = _Iterates(target, plan, start, on_device(generator, target.device))
    course = Course(plan.warmup + plan.epochs, num_batches(iterates), "constant")
    train(iterates, course, what="swag", state=state, save=save, progress=progress)
    least = LEAST_SHARE / target.prior.diagonal(target.layout, device=target.device)
    variances = iterates.squares / plan.epochs
    covariance = Swag.of(torch.maximum(variances, least), iterates.deviations.double(), plan.scale)
    gaussian = Gaussian(iterates.mean, covariance, target.layout, target.prior)
    return SwagFit(gaussian, torch.tensor(iterates.seen), int((variances <= least).sum()))


class _Iterates(TargetLearner):
    """theta (1, P) as it goes, and what is kept of it."""

    def __init__(self, target: CurvedTarget, plan: SwagPlan, start: Tensor, generator: torch.Generator) -> None:
        self.theta = start.to(target.device, target.dtype, copy=True).unsqueeze(0)
        super().__init__(
            target, Adam([[self.theta]], target.device), generator, batch_size=plan.batch_size, num_draws=1
        )
        self.plan = plan
        self.optimizer.state[self.theta] = {
            "step": torch.zeros((), dtype=torch.float32, device=target.device),
            "momentum": torch.zeros_like(self.theta),
        }
        size = target.layout.num_params
        self.mean = torch.zeros(size, dtype=torch.float64, device=target.device)
        self.squares = torch.zeros_like(self.mean)  # sum of squared distances from the mean (Welford)
        self.deviations = self.theta.new_zeros(0, size)
        self.num_taken = 0
        self.seen: list[float] = []

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.seen)

    @property
    def objective(self) -> Sequence[float]:
        """The estimate of the log joint in each."""
        return self.seen

    def rates(self, epoch: int) -> Sequence[float]:
        """One for all."""
        return (self.plan.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Nothing is drawn but batches."""
        return ()

    @no_grad
    def update(self, *batch: Tensor) -> Tensor:
        """The log joint before one step."""
        own, rate = self.optimizer.state[self.theta], self.optimizer.param_groups[0]["lr"]
        log_joint, gradient = self.joint(*batch).log_joint_and_grad(self.theta)
        own["momentum"].mul_(self.plan.momentum).add_(gradient.to(self.theta.dtype) / self.num_examples)
        self.theta.add_(own["momentum"] * rate)
        own["step"] += 1
        return log_joint[0].double()

    def end_round(self, seen: Tensor) -> None:
        """Take the iterate that the epoch ends with, after the warm-up."""
        first = self.num_epochs
        self.seen += seen.mean(dim=1).tolist()
        if not bool(torch.isfinite(self.theta).all() & torch.isfinite(seen).all()):
            raise NumericError(
                f"the log joint is not finite in epoch {first + 1}",
                hint=f"use a \0learning_rate\0 below {self.plan.learning_rate:.3g}",
            )
        if first < self.plan.warmup:
            return
        self.num_taken += 1
        theta = self.theta[0].double()
        before = theta - self.mean
        self.mean += before / self.num_taken
        after = theta - self.mean
        self.squares += before * after
        self.deviations = torch.cat([self.deviations, after.to(self.theta.dtype).unsqueeze(0)])[-self.plan.rank :]

    def state(self) -> dict[str, Tensor]:
        """What was taken, and what was seen."""
        return {
            "swag.mean": self.mean.clone(),
            "swag.squares": self.squares.clone(),
            "swag.deviations": self.deviations.clone(),
            "history.log_joint": torch.tensor(self.seen, dtype=torch.float64),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self.mean, self.squares, self.deviations = (
            state[f"swag.{name}"].to(self.device).clone() for name in ("mean", "squares", "deviations")
        )
        self.seen = state["history.log_joint"].tolist()
        self.num_taken = max(0, len(self.seen) - self.plan.warmup)


def tamed(
    target: CurvedTarget,
    plan: SwagPlan,
    *,
    start: Tensor,
    generator: torch.Generator,
    progress: Progress = SILENT,
) -> tuple[SwagPlan, int]:
    """The plan with its learning rate halved as long as that ends a few epochs P / 2 nats higher; and the epochs that took.

    Noise and curvature are those at the start, where a network is sure of its labels and both are small: further on the same rate
    may be far too high. Around a mode draws of the posterior lie P / 2 nats below it, and iterates by the more the higher the rate.
    """
    done = 0

    def height(rate: float) -> float:
        """Of the last epoch's log joint."""
        nonlocal done
        done += _PILOT_EPOCHS
        pilot = replace(plan, warmup=0, epochs=_PILOT_EPOCHS, rank=2, learning_rate=rate)
        try:
            return float(fit_swag(target, pilot, start=start, generator=generator, progress=progress).history[-1])
        except NumericError:
            return -math.inf

    rate, own = plan.learning_rate, height(plan.learning_rate)
    for _ in range(_MOST_HALVINGS):
        halved = height(rate / 2)
        if halved <= own + target.layout.num_params / 2 and math.isfinite(own):
            break
        rate, own = rate / 2, halved
    return replace(plan, learning_rate=rate), done


def noise_trace(
    target: CurvedTarget, theta: Tensor, batch_size: int, generator: torch.Generator
) -> tuple[float, float]:
    """tr C, of the covariance of one example's gradient of the mean loss at theta (P,), and the passes over the data that finding it took.

    From the gradients of minibatches, B Var(g_B) / (1 - B / N), drawn without replacement.
    """
    order = torch.randperm(target.num_examples, generator=generator).to(target.device)
    batches = [rows for rows in order.split(batch_size) if len(rows) == batch_size][:_NOISE_BATCHES]
    stacked = theta.to(target.device, target.dtype).unsqueeze(0)
    mean = torch.zeros(target.layout.num_params, dtype=torch.float64, device=target.device)
    squares = torch.zeros((), dtype=torch.float64, device=target.device)
    for count, rows in enumerate(batches, start=1):
        gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(stacked)[1][0].double()
        before = gradient / target.num_examples - mean
        mean += before / count
        squares += (before * (gradient / target.num_examples - mean)).sum()
    variance = float(squares) / max(1, len(batches) - 1)
    share = batch_size / target.num_examples
    return batch_size * variance / (1 - share), len(batches) * share
