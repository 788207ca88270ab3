"""SWAG: a Gaussian from the iterates of SGD at a constant learning rate.

Maddox et al. (2019), arXiv:1902.02476: after a warm-up, the iterate at the end of every epoch enters a running mean and
variance, and its deviation from the running mean the last R columns. Steps descend the mean loss, including the prior's
part.

The learning rate sets the spread. The default is the rate at which the stationary distribution of SGD is closest to the
posterior in Kullback-Leibler divergence if curvature and gradient noise are proportional (Mandt, Hoffman and Blei 2017,
arXiv:1704.04289, section 4.1): l / (1 - momentum) = 2 B P / (N tr C), with C the covariance of one example's gradient.
This assumes independent noise in every step. The noise of shuffled batches cancels over an epoch, at whose end iterates
are taken, so the actual spread is smaller. `tamed` halves the rate if SGD diverges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.errors import NumericError
from bnncli.inference.refine import TargetLearner
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import on_device
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.structures.swag import Swag
from bnncli.targets.target import CurvedTarget
from bnncli.training.loop import LearningRateSchedule, Save, State, num_batches, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor

_PILOT_EPOCHS = 5  # epochs of a trial of a learning rate
_MOST_HALVINGS = 20
_NOISE_BATCHES = 64  # minibatches to estimate tr C
# share of the prior's variance given to a parameter that does not move, since every variance must be positive
LEAST_SHARE = 1e-10


@dataclass(frozen=True)
class SwagPlan:
    """Plan of the iterates.

    Args:
        warmup: epochs before the first used iterate.
        epochs: epochs after that, one iterate each.
        rank: R, number of last deviations kept.
        batch_size: examples per step.
        learning_rate: for the mean loss.
        momentum: share of the momentum that a step keeps.
        scale: s, factor on the whole covariance.
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
    """The result of a SWAG fit.

    Args:
        gaussian: over theta.
        history: (E,), mean log joint estimate of each epoch, nats.
        num_still: number of parameters that did not move, whose variance is LEAST_SHARE of the prior's.
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
    """Fit the Gaussian of SGD's iterates from start (P,).

    Args:
        generator: random generator of the shuffles.
        state, save: for resuming, as in bnncli.training.loop.train.
        progress: advances once per step.

    Raises:
        NumericError: the log joint is not finite.
    """
    iterates = _Iterates(target, plan, start, on_device(generator, target.device))
    course = LearningRateSchedule(plan.warmup + plan.epochs, num_batches(iterates), "constant")
    train(iterates, course, what="swag", state=state, save=save, progress=progress)
    least = LEAST_SHARE / target.prior.diagonal(target.layout, device=target.device)
    variances = iterates.squares / plan.epochs
    covariance = Swag.of(torch.maximum(variances, least), iterates.deviations.double(), plan.scale)
    gaussian = Gaussian(iterates.mean, covariance, target.layout, target.prior)
    return SwagFit(gaussian, torch.tensor(iterates.seen), int((variances <= least).sum()))


class _Iterates(TargetLearner):
    """The current theta (1, P), and the running moments of its iterates."""

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
        self.squares = torch.zeros_like(self.mean)  # sum of squared deviations from the mean (Welford)
        self.deviations = self.theta.new_zeros(0, size)
        self.num_taken = 0
        self.seen: list[float] = []

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.seen)

    @property
    def objective(self) -> Sequence[float]:
        """Log joint estimate of each epoch."""
        return self.seen

    def rates(self, epoch: int) -> Sequence[float]:
        """Return one learning rate for all parameters."""
        return (self.plan.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return no draws; steps only need batches."""
        return ()

    @no_grad
    def update(self, *batch: Tensor) -> Tensor:
        """Take one step; return the log joint before."""
        own, rate = self.optimizer.state[self.theta], self.optimizer.param_groups[0]["lr"]
        log_joint, gradient = self.joint(*batch).log_joint_and_grad(self.theta)
        own["momentum"].mul_(self.plan.momentum).add_(gradient.to(self.theta.dtype) / self.num_examples)
        self.theta.add_(own["momentum"] * rate)
        own["step"] += 1
        return log_joint[0].double()

    def end_round(self, seen: Tensor) -> None:
        """Add the iterate at the end of the epoch, after the warm-up."""
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
        """Return moments and history."""
        return {
            "swag.mean": self.mean.clone(),
            "swag.squares": self.squares.clone(),
            "swag.deviations": self.deviations.clone(),
            "history.log_joint": torch.tensor(self.seen, dtype=torch.float64),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state."""
        self.mean, self.squares, self.deviations = (
            state[f"swag.{name}"].to(self.device).clone() for name in ("mean", "squares", "deviations")
        )
        self.seen = state["history.log_joint"].tolist()
        self.num_taken = max(0, len(self.seen) - self.plan.warmup)


def halve_learning_rate(
    target: CurvedTarget,
    plan: SwagPlan,
    *,
    start: Tensor,
    generator: torch.Generator,
    progress: Progress = SILENT,
) -> tuple[SwagPlan, int]:
    """Halve the plan's learning rate while it ends a few epochs P / 2 nats higher; also return the epochs taken.

    Noise and curvature are measured at the start, where a network is sure of its labels and both are small; later the
    same rate may be far too high. Near a mode, draws of the posterior are P / 2 nats below it, and iterates lower the
    higher the rate.
    """
    done = 0

    def height(rate: float) -> float:
        """Return the log joint of the last epoch."""
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
    """Return tr C, C the covariance of one example's gradient of the mean loss at theta (P,), and the passes taken.

    Estimated from minibatch gradients, B Var(g_B) / (1 - B / N), drawn without replacement.
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
