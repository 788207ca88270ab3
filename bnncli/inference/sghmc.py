"""Stochastic-gradient Hamiltonian Monte Carlo, cyclical or not, with SGLD as a limit; all chains as one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.errors import NumericError
from bnncli.inference.dynamics import DrawStore, MemoryDraws, WhiteCoordinates, WhitenedLogJoint
from bnncli.inference.refine import TargetLearner
from bnncli.lazy import no_grad, torch
from bnncli.names import count_noun
from bnncli.numerics.random import on_device
from bnncli.progress import SILENT, Progress
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import CurvedTarget, LogJoint, Target
from bnncli.training.loop import LearningRateSchedule, Save, State, num_batches, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor


ITERATIONS = 20
MAX_ROWS = 2048  # sampled examples that represent the data of a network
_SQUARED_BATCHES = 32  # minibatches that initialise RMSprop


def largest_curvature(
    target: CurvedTarget,
    theta: Tensor,
    generator: torch.Generator,
    scale: Tensor | None = None,
    *,
    whitening: WhiteCoordinates | None = None,
) -> float:
    """Return the largest eigenvalue of G^1/2 H G^1/2 at theta (P,), H the Hessian of -log joint or its Gauss-Newton part.

    A lower bound within a few percent: the Rayleigh quotient after 20 products.

    Args:
        target: with all data; for a network, a few thousand sampled examples represent them.
        scale: G, (P,); 1 by default.
        whitening: coordinates of H, if not theta.
    """
    product = subsample_target(target, generator).hessian_operator(theta)
    if whitening is not None:
        product = whitening.products(product)
    root = torch.ones_like(theta, dtype=torch.float64) if scale is None else scale.double().sqrt()
    vector = torch.randn(len(theta), generator=generator, dtype=torch.float64).to(target.device)
    quotient = vector.new_zeros(())
    for _ in range(ITERATIONS):
        vector = vector / vector.norm()
        image = root * product((root * vector).unsqueeze(0))[0]
        quotient, vector = vector @ image, image
    return float(quotient)


def curvature_passes(target: CurvedTarget) -> float:
    """Return the gradient passes over the data that largest_curvature takes; a product counts as two."""
    rows = min(MAX_ROWS, target.num_examples) if isinstance(target, NetworkTarget) else target.num_examples
    return 2 * ITERATIONS * rows / target.num_examples


def subsample_target(target: CurvedTarget, generator: torch.Generator) -> CurvedTarget:
    """Return the target, or, for a network with many examples, its estimate from a random subset."""
    if not isinstance(target, NetworkTarget) or target.num_examples <= MAX_ROWS:
        return target
    rows = torch.randperm(target.num_examples, generator=generator)[:MAX_ROWS].sort().values
    return target.minibatch(*target.examples(rows))


def mean_square(
    target: CurvedTarget, theta: Tensor, batch_size: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return mean squares (P,) of minibatch gradients of the mean loss at theta (P,), and the passes taken."""
    order = torch.randperm(target.num_examples, generator=generator).to(target.device)
    batches = order.split(batch_size)[:_SQUARED_BATCHES]
    stacked = theta.to(target.device, target.dtype).unsqueeze(0)
    total = torch.zeros_like(stacked[0], dtype=torch.float64)
    for rows in batches:
        gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(stacked)[1]
        total += (gradient[0].double() / target.num_examples).square()
    return total / len(batches), sum(map(len, batches)) / target.num_examples


SMOOTHING = 0.99  # decay of the mean squared gradients, as in Li et al. (2016)
_EPSILON = 1e-3  # of the largest root mean square: directions without gradients move at most 1000 times as far
_LOOK_EVERY = 25  # epochs between checks for divergence, each of which is a sync


@dataclass(frozen=True)
class SghmcPlan:
    """Dynamics of the chains, and which states are kept.

    Args:
        epochs: passes over the data, over all cycles.
        num_cycles: number of cycles.
        num_draws: draws per cycle and chain, evenly spaced over its last part including its end.
        num_exploring: epochs of each cycle before that part.
        batch_size: examples per step.
        learning_rate: l, initial rate of each cycle.
        momentum_decay: a, in (0, 1].
        temperature: T.
        is_cyclical: whether the rate decays in each cycle, whose first part has no noise.
        is_preconditioned: whether G is RMSprop's.
    """

    epochs: int
    num_cycles: int
    num_draws: int
    num_exploring: int
    batch_size: int
    learning_rate: float
    momentum_decay: float
    temperature: float = 1.0
    is_cyclical: bool = True
    is_preconditioned: bool = False

    @property
    def cycle_length(self) -> int:
        """Epochs per cycle."""
        return self.epochs // self.num_cycles

    @property
    def spacing(self) -> int:
        """Epochs between draws; 0 if the last part of a cycle has fewer epochs than draws."""
        return (self.cycle_length - self.num_exploring) // self.num_draws

    def is_exploring(self, epoch: int) -> bool:
        """Return whether an epoch belongs to the first part of a cycle."""
        return epoch % self.cycle_length < self.num_exploring

    def is_kept(self, epoch: int) -> bool:
        """Return whether the state at the end of an epoch is a draw."""
        to_end = self.cycle_length - 1 - epoch % self.cycle_length
        return to_end % self.spacing == 0 and to_end // self.spacing < self.num_draws


@dataclass(frozen=True)
class SghmcRun:
    """The result of the sampler.

    Args:
        draws: (C, T, P), float32; may be memory-mapped.
        history: (E, C), mean over each epoch of the steps' log joint estimates, nats, float64.
    """

    draws: Tensor
    history: Tensor


def sample_sghmc(
    target: Target,
    plan: SghmcPlan,
    *,
    start: Tensor,
    generator: torch.Generator,
    square: Tensor | None = None,
    whitening: WhiteCoordinates | None = None,
    store: DrawStore | None = None,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> SghmcRun:
    """Sample (C, T, P) by chains that all use the same minibatches.

    Args:
        target: the log posterior, with all data.
        start: (C, P).
        generator: random generator of shuffles and noise.
        square: (P,), mean squared minibatch gradients that initialise RMSprop.
        whitening: of the Gaussian whose covariance is G, on the target's device.
        store: draw store; in memory by default.
        state, save: for resuming, as in bnncli.training.loop.train; the store already has the draws of the state.
        progress: advances once per step.

    Raises:
        NumericError: the log joint is not finite.
    """
    generator = on_device(generator, target.device)
    chains = _Chains(target, plan, start, generator, square, whitening, store or MemoryDraws())
    schedule = "cosine" if plan.is_cyclical else "constant"
    course = LearningRateSchedule(plan.epochs, num_batches(chains), schedule, num_cycles=plan.num_cycles)
    what = f"sghmc, {count_noun(len(start), 'chain')}"
    train(chains, course, what=what, state=state, save=save, progress=progress)
    chains.look()
    return SghmcRun(chains.store.draws(), torch.cat(chains.seen))


class _Chains(TargetLearner):
    """All chains; theta (or whitened coordinates) and momentum (C, P) are parameters and state of an optimizer."""

    def __init__(
        self,
        target: Target,
        plan: SghmcPlan,
        start: Tensor,
        generator: torch.Generator,
        square: Tensor | None,
        whitening: WhiteCoordinates | None,
        store: DrawStore,
    ) -> None:
        start = start.to(target.device)
        self.whitening = whitening
        self.theta = (start if whitening is None else whitening.z(start)).to(target.dtype, copy=True)
        super().__init__(
            target,
            Adam([[self.theta]], target.device),
            generator,
            batch_size=plan.batch_size,
            num_draws=len(start),
        )
        self.plan, self.store, self.seen_shape = plan, store, (len(start),)
        own = {"step": torch.zeros((), dtype=torch.float32, device=target.device)}
        own["momentum"] = torch.zeros_like(self.theta)
        if plan.is_preconditioned:
            assert square is not None
            own["square"] = square.to(self.theta).expand_as(self.theta).clone()
        self.optimizer.state[self.theta] = own
        self.seen: list[Tensor] = []
        self.num_kept = self._num_looked = self._num_done = 0

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return self._num_done

    @property
    def objective(self) -> Sequence[float]:
        """Empty: a sampler never stops early."""
        return ()

    def rates(self, epoch: int) -> Sequence[float]:
        """Return the initial rate of a cycle."""
        return (self.plan.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Draw normal noise (steps, C, P), or zeros, and whether RMSprop updates, (steps, 1)."""
        is_exploring = self.plan.is_exploring(self._num_done)
        is_silent = is_exploring and self.plan.is_cyclical
        shape = (num_steps, *self.theta.shape)
        noise = self.theta.new_zeros(shape) if is_silent else self.normal(num_steps, *self.theta.shape)
        return noise, self.theta.new_full((num_steps, 1), float(is_exploring))

    def joint(self, *examples: Tensor) -> LogJoint:
        """Return the batch's log joint in the coordinates of the chains."""
        found = super().joint(*examples)
        return found if self.whitening is None else WhitenedLogJoint(found, self.whitening)

    @no_grad
    def update(self, *parts: Tensor) -> Tensor:
        """Move all chains once; return the log joint (C,) before."""
        noise, is_learning, *batch = parts
        plan, own = self.plan, self.optimizer.state[self.theta]
        log_joint, gradient = self.joint(*batch).log_joint_and_grad(self.theta)
        gradient = gradient.to(self.theta.dtype)
        eta = self.optimizer.param_groups[0]["lr"] / self.num_examples
        if plan.is_preconditioned:
            mean = gradient / self.num_examples
            own["square"].add_(is_learning * (1 - SMOOTHING) * (mean.square() - own["square"]))
            scale = preconditioner(own["square"])
            gradient, noise = gradient * scale, noise * scale.sqrt()
        sd = (2 * plan.momentum_decay * plan.temperature * eta).sqrt()
        own["momentum"].mul_(1 - plan.momentum_decay).add_(gradient * eta).add_(noise * sd)
        self.theta.add_(own["momentum"])
        own["step"] += 1
        return log_joint.double()

    def end_round(self, seen: Tensor) -> None:
        """Keep the draw at the end of an epoch, and check for divergence from time to time."""
        self.seen.append(seen.mean(dim=1))
        if self.plan.is_kept(self._num_done):
            self.look()
            theta = self.theta if self.whitening is None else self.whitening.theta(self.theta)
            self.store.append(theta.float().clone())
            self.num_kept += 1
        elif self._num_done - self._num_looked >= _LOOK_EVERY:
            self.look()
        self._num_done += 1

    def look(self) -> None:
        """Raise NumericError unless the log joint and theta are finite."""
        self._num_looked = self._num_done
        if self.seen and not bool(torch.isfinite(self.seen[-1]).all() & torch.isfinite(self.theta).all()):
            raise NumericError(
                f"the chains diverged: the log joint is not finite by epoch {self._num_done + 1}",
                hint=f"use a \0learning_rate\0 below {self.plan.learning_rate:.3g}",
            )

    def state(self) -> dict[str, Tensor]:
        """Return the history and the number of kept draws, as ResumableDraws counts them."""
        seen = torch.cat(self.seen) if self.seen else self.theta.new_zeros(0, len(self.theta), dtype=torch.float64)
        own = self.optimizer.state[self.theta]
        return {
            "history.log_joint": seen.clone(),
            "num_steps": torch.zeros(self.num_kept, dtype=torch.int64),
            "num_done": own["step"].clone(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state; the store already has the draws."""
        seen = state["history.log_joint"].to(self.device)
        self.seen, self._num_done = [seen], len(seen)
        self.num_kept = len(state["num_steps"])


def preconditioner(square: Tensor) -> Tensor:
    """Return G (..., P) with mean 1: the inverse root of mean squared gradients (..., P)."""
    root = square.sqrt()
    inverse = 1 / (root + _EPSILON * root.amax(dim=-1, keepdim=True) + torch.finfo(root.dtype).tiny)
    return inverse / inverse.mean(dim=-1, keepdim=True)


def variance_inflation(
    plan: SghmcPlan, stiffness: float, num_examples: int, learning_rate: float
) -> tuple[float, float]:
    """Return the relative excess variance along the stiffest direction, due to step length and, at most, to minibatches.

    Args:
        stiffness: h, largest curvature of -log joint under G.
        learning_rate: while draws are kept.
    """
    reach = learning_rate / num_examples * stiffness
    stable = 2 * (2 - plan.momentum_decay)
    by_length = float("inf") if reach >= stable else reach / (stable - reach)
    others = max(0.0, num_examples / plan.batch_size - 1)
    by_batches = reach * others / (2 * plan.momentum_decay * plan.temperature) if plan.temperature > 0 else float("inf")
    return by_length, by_batches


ALLOWED = 0.05  # excess variance due to step length that an automatic learning rate allows
_FORGOTTEN = math.log(10)  # draws count as separate once a tenth of their deviation is shared

PlanAt = Callable[[float], SghmcPlan]  # maps a learning rate, the initial one of each cycle, to a plan


@dataclass(frozen=True)
class ChainPlan:
    """The plan for chains on a target.

    Args:
        plan: with its learning rate.
        square: (P,), initial state of RMSprop, if used.
        stiffness: largest curvature of -log joint under G over the given places.
        excess: relative excess variance along the stiffest direction: due to step length and, at most, to minibatches.
        passes: gradient passes over the data for all this.
    """

    plan: SghmcPlan
    square: Tensor | None
    stiffness: float
    excess: tuple[float, float]
    passes: float


def plan_chains(
    target: CurvedTarget,
    plan_at: PlanAt,
    *,
    places: Sequence[Tensor],
    learning_rate: float | None,
    whitening: WhiteCoordinates | None,
    squares: torch.Generator,
    generator: torch.Generator,
) -> ChainPlan:
    """Plan chains on a target, at the given learning rate or at the largest that its stiffness allows.

    Args:
        target: the log posterior, with all data.
        places: theta (P,) each, on the target's device: where chains start, and where they go if known. The stiffest
            counts: a network that is sure of its labels has little curvature at the start and more further on.
        learning_rate: for the mean loss, initial rate of each cycle; None chooses one.
        whitening: coordinates of the chains.
        squares: random generator of the minibatches that initialise RMSprop.
        generator: random generator of the search for the largest curvature.
    """
    any_rate = plan_at(1.0)  # everything but the rate is known
    passes, square = len(places) * curvature_passes(target), None
    if any_rate.is_preconditioned:
        batch_size = _squared_batch(any_rate.batch_size, target.num_examples)
        square, more = mean_square(target, places[0], batch_size, squares)
        passes += more
    scale = None if square is None else preconditioner(square)
    stiffness = max(largest_curvature(target, place, generator, scale, whitening=whitening) for place in places)
    rate = learning_rate
    if rate is None:
        rate = _bearable_reach(any_rate, target.num_examples, is_whitened=whitening is not None)
        rate *= target.num_examples / stiffness
    plan = plan_at(rate)
    excess = variance_inflation(plan, stiffness, target.num_examples, _share(plan, plan.num_exploring) * rate)
    return ChainPlan(plan, square, stiffness, excess, passes)


def num_independent_draws(plan: SghmcPlan, curvature: float, num_examples: int) -> tuple[int, int]:
    """Return how many of a cycle's draws are nearly independent (at least one), and every how many cycles one is, if one.

    Two draws are nearly independent if the slowest direction retains at most a tenth of its deviation.

    Args:
        curvature: lower bound on the curvature of -log joint under G.
    """
    num_batches = -(-num_examples // plan.batch_size)
    found = []
    for epoch in range(plan.cycle_length):
        rate = plan.learning_rate * _share(plan, epoch + 0.5)
        found.append(num_batches * _forgetting(plan.momentum_decay, rate / num_examples * curvature))
    total, spacing = 0.0, plan.cycle_length
    for back, one in enumerate(reversed(found), start=1):
        total += one
        if total >= _FORGOTTEN:
            spacing = back
            break
    whole = sum(found)
    in_turn = 1 if whole >= _FORGOTTEN else plan.num_cycles if whole == 0 else math.ceil(_FORGOTTEN / whole)
    return max(1, plan.num_draws * plan.spacing // spacing), min(in_turn, plan.num_cycles)


def _forgetting(decay: float, reach: float) -> float:
    """Return the e-foldings per step: minus the logarithm of the spectral radius; 0 if unstable."""
    trace, determinant = 2 - decay - reach, 1 - decay
    inside = trace**2 - 4 * determinant
    radius = math.sqrt(determinant) if inside < 0 else 0.5 * (abs(trace) + math.sqrt(inside))
    return math.inf if radius == 0 else max(0.0, -math.log(radius))


def _bearable_reach(plan: SghmcPlan, num_examples: int, *, is_whitened: bool) -> float:
    """Return the automatic initial learning rate of a cycle, as eta times the largest curvature."""
    decay, last, num_batches = plan.momentum_decay, _share(plan, plan.num_exploring), num_examples / plan.batch_size
    reach = ALLOWED / (1 + ALLOWED) * 2 * (2 - decay) / last
    if not is_whitened:
        return min(reach, 2 - decay)  # at most half the stable limit while exploring
    if num_batches > 1 and plan.temperature > 0:  # all directions are the stiffest, and have its minibatch noise
        reach = min(reach, ALLOWED * 2 * decay * plan.temperature / (num_batches - 1) / last)
    return min(reach, 0.25 * (2 - decay))  # directions stiffen far from the base


def _squared_batch(batch_size: int, num_examples: int) -> int:
    """Return the batch size to initialise RMSprop: the gradient of a whole split vanishes at its mode."""
    return min(batch_size, max(1, num_examples // 32))


def _share(plan: SghmcPlan, epoch: float) -> float:
    """Return the learning rate at an epoch of a cycle, relative to its initial value."""
    return 0.5 * (1 + math.cos(math.pi * epoch / plan.cycle_length)) if plan.is_cyclical else 1.0
