"""Stochastic-gradient Hamiltonian Monte Carlo, cyclical or not, with SGLD as its limit; all chains as one batch.

Chen, Fox and Guestrin (2014), arXiv:1402.4102, equation (15), with U = -log joint, N examples and the learning rate l that is
meant for the mean loss, eta = l / N:

    v <- (1 - a) v - eta G grad U(theta) + sqrt(2 a eta T G) xi,    theta <- theta + v,

whose stationary density is near exp(-U / T): T = 1 is the posterior. a = 1 is SGLD (Welling and Teh 2011). Cyclical (Zhang et al. 2020,
arXiv:1902.03932): l falls along a cosine in each cycle, whose first part explores without noise and whose last part samples. (Their
published code has T = 1 / N where it says 1.) G is 1, or the covariance of a Gaussian near the posterior, in whose coordinates the chains
then move (Girolami and Calderhead 2011, section 5, with one metric for all theta), or that of RMSprop (Li et al. 2016, arXiv:1512.07666),
which learns before draws are kept and stands still while they are: then no derivative of G is missing.

No step is accepted or refused, so draws are biased. On a Gaussian with curvature h the variance is exactly

    T / h / (1 - eta h / (2 (2 - a)))     of all data,

and at most about 1 + eta h (N / B - 1) / (2 a T) times that of minibatches of B: over whole epochs of shuffled batches their noise
cancels, so that chains which remember longer than an epoch have less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.errors import NumericError
from bnncli.inference.draw_stores import DrawStore, MemoryDraws
from bnncli.inference.target_learner import TargetLearner
from bnncli.inference.white_coordinates import WhiteCoordinates, WhitenedLogJoint
from bnncli.lazy import no_grad, torch
from bnncli.names import counted
from bnncli.numerics.seeds import on_device
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import LogJoint, Target
from bnncli.training.adam import Adam
from bnncli.training.course import Course
from bnncli.training.learner import num_batches
from bnncli.training.loop import Save, State, train

if TYPE_CHECKING:
    from torch import Tensor

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
