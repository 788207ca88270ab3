"""Stochastic-gradient Hamiltonian Monte Carlo, cyclical or not, with SGLD as its limit; all chains as one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.errors import NumericError
from bnncli.inference.dynamics import DrawStore, MemoryDraws, WhiteCoordinates, WhitenedLogJoint
from bnncli.inference.refine import TargetLearner
from bnncli.lazy import no_grad, torch
from bnncli.names import counted
from bnncli.numerics.random import on_device
from bnncli.progress import SILENT, Progress
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import CurvedTarget, LogJoint, Target
from bnncli.training.loop import Course, Save, State, num_batches, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor


ITERATIONS = 20
MAX_ROWS = 2048  # examples of a network that stand for all
_SQUARED_BATCHES = 32  # that RMSprop starts from


def largest_curvature(
    target: CurvedTarget,
    theta: Tensor,
    generator: torch.Generator,
    scale: Tensor | None = None,
    *,
    whitening: WhiteCoordinates | None = None,
) -> float:
    """The largest eigenvalue of G^1/2 H G^1/2 at theta (P,), H the Hessian of -log joint, or its Gauss-Newton part.

    From below, within a few percent: the Rayleigh quotient after 20 products.

    Args:
        target: with all data; of a network a few thousand seeded examples stand for them.
        scale: G, (P,); 1 by default.
        whitening: in whose coordinates H is taken, where not in those of theta.
    """
    product = sampled(target, generator).hessian_operator(theta)
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
    """Gradient passes over the data that largest_curvature takes: a product counts as two."""
    rows = min(MAX_ROWS, target.num_examples) if isinstance(target, NetworkTarget) else target.num_examples
    return 2 * ITERATIONS * rows / target.num_examples


def sampled(target: CurvedTarget, generator: torch.Generator) -> CurvedTarget:
    """The target itself; of a network with many examples, as seeded ones of them tell it."""
    if not isinstance(target, NetworkTarget) or target.num_examples <= MAX_ROWS:
        return target
    rows = torch.randperm(target.num_examples, generator=generator)[:MAX_ROWS].sort().values
    return target.minibatch(*target.examples(rows))


def mean_square(
    target: CurvedTarget, theta: Tensor, batch_size: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Mean squares (P,) of the gradient of the mean loss of minibatches at theta (P,), and the passes that they took."""
    order = torch.randperm(target.num_examples, generator=generator).to(target.device)
    batches = order.split(batch_size)[:_SQUARED_BATCHES]
    stacked = theta.to(target.device, target.dtype).unsqueeze(0)
    total = torch.zeros_like(stacked[0], dtype=torch.float64)
    for rows in batches:
        gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(stacked)[1]
        total += (gradient[0].double() / target.num_examples).square()
    return total / len(batches), sum(map(len, batches)) / target.num_examples


SMOOTHING = 0.99  # of the mean square of gradients, Li et al.'s
_EPSILON = (
    1e-3  # of the largest root mean square: directions without gradients are moved no more than 1000 times as far
)
_LOOK_EVERY = 25  # epochs after which what was seen is looked at, which waits for the device


@dataclass(frozen=True)
class SghmcPlan:
    """How chains move, and which states are kept.

    Args:
        epochs: passes over the data, of all cycles together.
        num_cycles: that the epochs are divided into.
        num_draws: kept of each cycle, of each chain, evenly over its last part and at its end.
        num_exploring: epochs of each cycle before that part.
        batch_size: examples a step.
        learning_rate: l, the first of each cycle.
        momentum_decay: a, in (0, 1].
        temperature: T.
        is_cyclical: whether the rate falls in each cycle, and the first part of it is without noise.
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
        """Epochs of a cycle."""
        return self.epochs // self.num_cycles

    @property
    def spacing(self) -> int:
        """Epochs from one draw to the next; 0 where the last part of a cycle has fewer epochs than draws."""
        return (self.cycle_length - self.num_exploring) // self.num_draws

    def is_exploring(self, epoch: int) -> bool:
        """Whether an epoch is of the first part of a cycle."""
        return epoch % self.cycle_length < self.num_exploring

    def is_kept(self, epoch: int) -> bool:
        """Whether the state at the end of an epoch is a draw."""
        to_end = self.cycle_length - 1 - epoch % self.cycle_length
        return to_end % self.spacing == 0 and to_end // self.spacing < self.num_draws


@dataclass(frozen=True)
class SghmcRun:
    """What the sampler returns.

    Args:
        draws: (C, T, P), float32; may be mapped from a file.
        history: (E, C), the mean over each epoch of the steps' estimates of the log joint, nats, float64.
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
    """Draws (C, T, P) by chains that all see the same minibatches.

    Args:
        target: the log posterior, with all data.
        start: (C, P).
        generator: of shuffles and noise.
        square: (P,), mean squares of the gradient of minibatches that RMSprop starts from.
        whitening: of the Gaussian whose covariance is G, on the target's device.
        store: where draws are kept; in memory by default.
        state, save: to resume, as in bnncli.training.loop.train; the store has the draws of the state.
        progress: advanced once a step.

    Raises:
        NumericError: the log joint is not finite.
    """
    generator = on_device(generator, target.device)
    chains = _Chains(target, plan, start, generator, square, whitening, store or MemoryDraws())
    schedule = "cosine" if plan.is_cyclical else "constant"
    course = Course(plan.epochs, num_batches(chains), schedule, num_cycles=plan.num_cycles)
    what = f"sghmc, {counted(len(start), 'chain')}"
    train(chains, course, what=what, state=state, save=save, progress=progress)
    chains.look()
    return SghmcRun(chains.store.draws(), torch.cat(chains.seen))


class _Chains(TargetLearner):
    """All chains: theta, or its coordinates by the whitening, and momentum (C, P) lie where an optimizer's parameters and state do."""

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
        """Nothing: a sampler never ends early."""
        return ()

    def rates(self, epoch: int) -> Sequence[float]:
        """The first of a cycle."""
        return (self.plan.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Standard normal noise (steps, C, P), or zeros, and whether RMSprop learns, (steps, 1)."""
        is_exploring = self.plan.is_exploring(self._num_done)
        is_silent = is_exploring and self.plan.is_cyclical
        shape = (num_steps, *self.theta.shape)
        noise = self.theta.new_zeros(shape) if is_silent else self.normal(num_steps, *self.theta.shape)
        return noise, self.theta.new_full((num_steps, 1), float(is_exploring))

    def joint(self, *examples: Tensor) -> LogJoint:
        """As a step's batch tells it, in the coordinates that the chains move in."""
        found = super().joint(*examples)
        return found if self.whitening is None else WhitenedLogJoint(found, self.whitening)

    @no_grad
    def update(self, *parts: Tensor) -> Tensor:
        """The log joint (C,) before one move of all chains."""
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
        """Keep the draw that an epoch ends with; look at what was seen now and then."""
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
        """Pass where all that was seen, and theta, are finite. Raises NumericError otherwise."""
        self._num_looked = self._num_done
        if self.seen and not bool(torch.isfinite(self.seen[-1]).all() & torch.isfinite(self.theta).all()):
            raise NumericError(
                f"the chains diverged: the log joint is not finite by epoch {self._num_done + 1}",
                hint=f"use a \0learning_rate\0 below {self.plan.learning_rate:.3g}",
            )

    def state(self) -> dict[str, Tensor]:
        """What was seen, and how much was kept, as ResumableDraws count it."""
        seen = torch.cat(self.seen) if self.seen else self.theta.new_zeros(0, len(self.theta), dtype=torch.float64)
        own = self.optimizer.state[self.theta]
        return {
            "history.log_joint": seen.clone(),
            "num_steps": torch.zeros(self.num_kept, dtype=torch.int64),
            "num_done": own["step"].clone(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; the store has the draws already."""
        seen = state["history.log_joint"].to(self.device)
        self.seen, self._num_done = [seen], len(seen)
        self.num_kept = len(state["num_steps"])


def preconditioner(square: Tensor) -> Tensor:
    """G (..., P) with mean 1: one over the root of mean squares of gradients (..., P)."""
    root = square.sqrt()
    inverse = 1 / (root + _EPSILON * root.amax(dim=-1, keepdim=True) + torch.finfo(root.dtype).tiny)
    return inverse / inverse.mean(dim=-1, keepdim=True)


def inflation(plan: SghmcPlan, stiffness: float, num_examples: int, learning_rate: float) -> tuple[float, float]:
    """By what the variance along the stiffest direction is too large: by the length of steps, and by minibatches at most; 0 is none.

    Args:
        stiffness: largest curvature of -log joint under G, h.
        learning_rate: while draws are kept.
    """
    reach = learning_rate / num_examples * stiffness
    stable = 2 * (2 - plan.momentum_decay)
    by_length = float("inf") if reach >= stable else reach / (stable - reach)
    others = max(0.0, num_examples / plan.batch_size - 1)
    by_batches = reach * others / (2 * plan.momentum_decay * plan.temperature) if plan.temperature > 0 else float("inf")
    return by_length, by_batches


ALLOWED = 0.05  # by which the length of steps may make the variance too large, where no learning rate is given
_FORGOTTEN = math.log(10)  # of draws that are told to be apart a tenth of their deviation is still shared

PlanAt = Callable[[float], SghmcPlan]  # of a learning rate, the first of each cycle


@dataclass(frozen=True)
class Planned:
    """How chains move on a target.

    Args:
        plan: with its learning rate.
        square: (P,), what RMSprop starts from, where it preconditions.
        stiffness: the largest curvature of -log joint under G, of the places that were looked at.
        excess: by what the variance along the stiffest direction is too large: by the length of steps, and by minibatches at most.
        passes: gradient passes over the data that all that took.
    """

    plan: SghmcPlan
    square: Tensor | None
    stiffness: float
    excess: tuple[float, float]
    passes: float


def planned(
    target: CurvedTarget,
    plan_at: PlanAt,
    *,
    places: Sequence[Tensor],
    learning_rate: float | None,
    whitening: WhiteCoordinates | None,
    squares: torch.Generator,
    generator: torch.Generator,
) -> Planned:
    """How chains move on a target, at the learning rate given, or at the largest that its stiffness allows.

    Args:
        target: the log posterior, with all data.
        places: theta (P,) each, on the target's device: where chains start, and where they go if that is known. The stiffest counts:
            a network that is sure of its labels has little curvature where chains start, and more where they go.
        learning_rate: for the mean loss, the first of each cycle; None chooses one.
        whitening: of the coordinates that chains move in.
        squares: of the minibatches that RMSprop starts from. generator: of the search for the largest curvature.
    """
    any_rate = plan_at(1.0)  # all but the rate is known
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
    excess = inflation(plan, stiffness, target.num_examples, _share(plan, plan.num_exploring) * rate)
    return Planned(plan, square, stiffness, excess, passes)


def num_apart(plan: SghmcPlan, curvature: float, num_examples: int) -> tuple[int, int]:
    """How many of the draws that a cycle keeps are nearly independent, one at least, and of how many cycles in turn those of one are.

    Two draws are where the direction that forgets most slowly has a tenth left of where it was.

    Args:
        curvature: the smallest of -log joint under G, or less.
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
    """By how many e-foldings a step forgets: minus the logarithm of the spectral radius; 0 where it does not."""
    trace, determinant = 2 - decay - reach, 1 - decay
    inside = trace**2 - 4 * determinant
    radius = math.sqrt(determinant) if inside < 0 else 0.5 * (abs(trace) + math.sqrt(inside))
    return math.inf if radius == 0 else max(0.0, -math.log(radius))


def _bearable_reach(plan: SghmcPlan, num_examples: int, *, is_whitened: bool) -> float:
    """The learning rate of each cycle's start where none is given, in stiffest directions: eta times their curvature."""
    decay, last, num_batches = plan.momentum_decay, _share(plan, plan.num_exploring), num_examples / plan.batch_size
    reach = ALLOWED / (1 + ALLOWED) * 2 * (2 - decay) / last
    if not is_whitened:
        return min(reach, 2 - decay)  # no more than half of what is stable, while exploring
    if num_batches > 1 and plan.temperature > 0:  # all directions are the stiffest, with its noise of minibatches
        reach = min(reach, ALLOWED * 2 * decay * plan.temperature / (num_batches - 1) / last)
    return min(reach, 0.25 * (2 - decay))  # they stiffen far from the base


def _squared_batch(batch_size: int, num_examples: int) -> int:
    """Examples of the batches that RMSprop starts from: a whole split has no gradient at its mode."""
    return min(batch_size, max(1, num_examples // 32))


def _share(plan: SghmcPlan, epoch: float) -> float:
    """The learning rate at an epoch of a cycle, of that at its start."""
    return 0.5 * (1 + math.cos(math.pi * epoch / plan.cycle_length)) if plan.is_cyclical else 1.0
