"""Refinement: push a Gaussian posterior through a normalizing flow that maximises the ELBO (Kristiadi et al. 2022)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError
from bnncli.flows import FlowLayer, Recipe, build_layers, choose_recipe, choose_space, push
from bnncli.lazy import torch
from bnncli.numerics.random import on_device
from bnncli.parameters.layouts import ParamLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.structures.directions import Subspace
from bnncli.system.devices import single_threaded
from bnncli.targets.target import LogJoint, Target, value_with_gradient
from bnncli.training.loop import LearningRateSchedule, Save, State, num_batches, steps_at_once, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor


_MAX_FULL_CHUNK = 32  # full-data steps whose draws are prepared at once


class TargetLearner:
    """Base of learners that train on minibatches of a target.

    Args:
        target: the log posterior, with all data.
        optimizer: holds the parameters.
        generator: random generator of shuffles and draws, on the parameters' device or the CPU.
        batch_size: examples per step; the target's number or more for all data.
        num_draws: thetas whose gradients a step takes.
    """

    shuffles = True
    draws_in_steps = False
    seen_shape: tuple[int, ...] = ()
    constants: object = None

    def __init__(
        self, target: Target, optimizer: Adam, generator: torch.Generator, *, batch_size: int, num_draws: int
    ) -> None:
        self.target, self.optimizer, self.generator = target, optimizer, generator
        self.batch_size = batch_size if batch_size < target.num_examples else None
        step_bytes = target.dtype.itemsize * num_draws * target.layout.num_params
        if self.batch_size is not None:
            none = target.examples(torch.empty(0, dtype=torch.int64, device=target.device))
            one = sum(part.shape[1:].numel() * part.dtype.itemsize for part in none)
            step_bytes = max(step_bytes, self.batch_size * one)
        most = _MAX_FULL_CHUNK if self.batch_size is None else num_batches(self)  # type: ignore[arg-type]
        self.steps_at_once = steps_at_once(step_bytes, target.device, most=most)
        # A graph needs data in place; data copied to the device in blocks cannot be captured.
        self.is_capturable = target.is_capturable and (self.batch_size is not None or target.is_resident)
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return self.target.device

    @property
    def num_examples(self) -> int:
        """Number of the target's examples."""
        return self.target.num_examples

    def note(self) -> str:
        """Return no note."""
        return ""

    def begin_epoch(self, order: Tensor | None) -> None:
        """Set the order from which batches are taken."""
        assert order is not None
        self._order = order.to(self.device)

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """Return the target's examples, each (steps, B, ...)."""
        return tuple(part.unflatten(0, (num_steps, -1)) for part in self.target.examples(self._order[rows]))

    def normal(self, num_steps: int, *shape: int) -> Tensor:
        """Draw standard normals (steps, ...) in the target's precision, on the device."""
        generator = self.generator
        noise = torch.randn((num_steps, *shape), generator=generator, device=generator.device, dtype=self.target.dtype)
        return noise.to(self.device)

    def joint(self, *examples: Tensor) -> LogJoint:
        """Return the target's estimate from a step's batch, or the target itself without one."""
        return self.target.minibatch(*examples) if examples else self.target


@dataclass(frozen=True)
class Objective:
    """The ELBO of a flow on a base, less the base's entropy.

    Args:
        target: the log posterior, with all data.
        mean: (P,), the base's, in the steps' precision.
        base: on the target's device, with its covariance in the steps' precision.
        space: whitened, theta = mean + L F(z), or weight, theta = F(mean + L z).
        subspace: of whitened coordinates, if the layers act only there.
    """

    target: Target
    mean: Tensor
    base: Gaussian
    space: str
    subspace: Subspace | None = None

    @classmethod
    def of(cls, target: Target, base: Gaussian, space: str, subspace: Subspace | None = None) -> Objective:
        """Build the objective in the target's precision, on its device."""
        covariance = base.covariance.to(device=target.device, dtype=target.dtype)
        single = Gaussian(base.mean.to(target.device), covariance, base.layout, base.prior)
        inside = None if subspace is None else subspace.to(device=target.device, dtype=target.dtype)
        return cls(target, single.mean.to(target.dtype), single, space, inside)

    def estimate(self, layers: Sequence[FlowLayer], noise: Tensor, *examples: Tensor) -> Tensor:
        """Return the estimate of each draw, (S,), nats.

        Args:
            layers: applied in order.
            noise: (S, P), standard normal.
            examples: the target's `examples` of a minibatch; none for all data.
        """
        whitened = self.space == "whitened"
        first = noise if whitened else self.mean + self.base.covariance.unwhiten(noise)
        first = first if self.subspace is None else self.subspace.reduce(first)
        has_score = whitened and all(hasattr(layer, "push_score") for layer in layers)
        score = -first if has_score else None
        x, total = push(layers, first)
        if score is not None:
            with torch.no_grad():
                for layer in layers:
                    score = layer.push_score(score)  # type: ignore[attr-defined]
        image = x if self.subspace is None else noise + self.subspace.lift(x - first)
        theta = self.mean + self.base.covariance.unwhiten(image) if whitened else image

        joint = self.target.minibatch(*examples) if examples else self.target
        log_joint = value_with_gradient(theta, joint.log_joint_and_grad).to(noise.dtype)
        if score is None:
            return log_joint + total
        path = log_joint - (score * x).sum(dim=1)
        return path + (log_joint + total - path).detach()


class StepSizes(NamedTuple):
    """Per step: examples (N or more: all data) and thetas drawn; Adam's initial learning rate."""

    batch_size: int
    num_draws: int
    learning_rate: float


class FlowLearner(TargetLearner):
    """Trains flow layers to maximise an objective.

    Args:
        objective: to maximise.
        layers: nn.Modules on the target's device.
        sizes: of a step.
        generator: random generator of shuffles and draws, on the layers' device or the CPU.

    Attributes:
        elbo: mean estimate of each epoch, less the base's entropy, nats.
    """

    def __init__(
        self, objective: Objective, layers: Sequence[Any], sizes: StepSizes, generator: torch.Generator
    ) -> None:
        self.layers, self.sizes = layers, sizes
        self.estimate = objective.estimate
        self.elbo: list[float] = []
        optimizer = Adam([[part for layer in layers for part in layer.parameters()]], objective.target.device)
        super().__init__(objective.target, optimizer, generator, batch_size=sizes.batch_size, num_draws=sizes.num_draws)

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.elbo)

    @property
    def objective(self) -> Sequence[float]:
        """ELBO of each epoch."""
        return self.elbo

    def rates(self, epoch: int) -> Sequence[float]:
        """Return one learning rate for all layers."""
        return (self.sizes.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Draw standard normals (steps, S, P)."""
        return (self.normal(num_steps, self.sizes.num_draws, self.target.layout.num_params),)

    def update(self, *parts: Tensor) -> Tensor:
        """Update the layers once; return the ELBO estimate before, float64."""
        estimate = self.estimate(self.layers, *parts).mean()
        self.optimizer.zero_grad()
        estimate.neg().backward()
        self.optimizer.step()
        return estimate.detach().double()

    def end_round(self, seen: Tensor) -> None:
        """Record the mean ELBO estimate of each epoch."""
        values, first = seen.mean(dim=1), self.num_epochs
        self.elbo += values.tolist()
        bad = torch.isfinite(values).logical_not().nonzero()
        if len(bad):
            raise NumericError(
                f"the ELBO is not finite in epoch {first + int(bad[0]) + 1}",
                hint=f"use a \0learning_rate\0 below {self.sizes.learning_rate:g}",
            )

    def state(self) -> dict[str, Tensor]:
        """Return the history."""
        return {"history.elbo": torch.tensor(self.elbo, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the history."""
        self.elbo = state["history.elbo"].tolist()


MIN_ROUND_STEPS = 25  # steps between checks of the ELBO and saved states

# Multiplications per step below which one thread is as fast as two, and far faster beside other programs.
_SMALL_STEP = 2**21


@dataclass(frozen=True)
class RefineFit:
    """A refined posterior.

    Args:
        posterior: the flow.
        history: (E,), mean over each epoch of the steps' ELBO estimates, nats.
        seconds: wall-clock time of the fit.
        is_early: whether it stopped early because the ELBO plateaued.
    """

    posterior: Flow
    history: Tensor
    seconds: float
    is_early: bool


def fit_flow(
    target: Target,
    base: Gaussian,
    *,
    generator: torch.Generator,
    flow: str = "radial",
    length: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    num_draws: int | None = None,
    patience: int = 0,
    space: str = "auto",
    settings: Mapping[str, Any] | None = None,
    subspace: Subspace | None = None,
    go_on: Flow | None = None,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> RefineFit:
    """Fit a flow of `length` layers on a base that maximises the ELBO of a target.

    Options that are None take the flow's own default, its `recipe`.

    Args:
        target: the log posterior, with all data.
        base: the Gaussian to start from.
        generator: random generator of initial layers, shuffles and draws.
        flow: kind of layer.
        length: number of layers.
        epochs: limit on passes over the data.
        batch_size: examples per step; N or more for all data at once.
        learning_rate: initial rate of Adam, decaying to 0 along a cosine.
        num_draws: thetas drawn per step.
        patience: rounds without improvement of the ELBO before training stops early; 0 for never.
        space: where the layers act: whitened, theta = m + L F(z), or weight, theta = F(m + L z), as published; auto for
            the kind's default.
        settings: of the layers: rank, hidden, scale; missing or None for the kind's defaults.
        subspace: of whitened coordinates, to which the layers are restricted.
        go_on: flow of the same kind on the same base for a similar target, whose layers are the initial ones.
        state, save: for resuming, as in bnncli.training.loop.train.
        progress: advances once per step.

    Raises:
        NumericError: the ELBO of an epoch is not finite.
        UsageError: there is no such flow, or it does not support a setting or the space.
    """
    started = time.perf_counter()
    choice = choose_recipe(
        flow,
        length=length,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        num_draws=num_draws,
    )
    space = choose_space(flow, space)
    objective = Objective.of(target, base, space, subspace)
    acted = target.layout if subspace is None else subspace.layout
    learner = _new_learner(objective, acted, flow, choice, generator=generator, settings=settings or {})
    if go_on is not None:
        trained: tuple[Any, ...] = go_on.layers
        for layer, other in zip(learner.layers, trained, strict=True):
            layer.load_state_dict(other.state_dict())
    course = LearningRateSchedule(choice.epochs, num_batches(learner), patience=patience, round_steps=MIN_ROUND_STEPS)
    with _threads_for(target, choice):
        train(learner, course, what="refine", state=state, save=save, progress=progress)
    layers = tuple(layer.to(dtype=torch.float64).requires_grad_(False) for layer in learner.layers)
    within = None if subspace is None else subspace.to(device=target.device)
    return RefineFit(
        Flow(base.to(target.device), layers, flow, space, within),
        torch.tensor(learner.elbo, dtype=torch.float64) + base.entropy,
        time.perf_counter() - started,
        course.is_early,
    )


def _new_learner(
    objective: Objective,
    layout: ParamLayout,
    flow: str,
    choice: Recipe,
    *,
    generator: torch.Generator,
    settings: Mapping[str, Any],
) -> FlowLearner:
    """Return a learner with new layers for what `layout` describes."""
    target = objective.target
    layers = build_layers(flow, layout, generator, length=choice.length, **settings)
    layers = tuple(layer.to(device=target.device, dtype=target.dtype) for layer in layers)
    sizes = StepSizes(choice.batch_size, choice.num_draws, choice.learning_rate)
    return FlowLearner(objective, layers, sizes, generator=on_device(generator, target.device))


def _threads_for(target: Target, choice: Recipe) -> AbstractContextManager[None]:
    """Use one thread if steps are small."""
    num_multiplications = min(choice.batch_size, target.num_examples) * target.layout.num_params * choice.num_draws
    return single_threaded() if num_multiplications < _SMALL_STEP else nullcontext()
