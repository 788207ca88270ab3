"""Refinement: a Gaussian posterior pushed through a normalising flow that maximises the ELBO.

Kristiadi, Eschenhagen, Hennig (2022), arXiv:2205.10041. The base stays as it is; only the layers learn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.covariances._subspace import Subspace
from bnncli.flows import Recipe, build_layers, choose_recipe, choose_space
from bnncli.inference.flow_learner import FlowLearner, StepSizes
from bnncli.inference.objective import Objective
from bnncli.lazy import torch
from bnncli.machine.devices import single_threaded
from bnncli.numerics.seeds import on_device
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import Target
from bnncli.theta.layout import ParamLayout
from bnncli.training.course import Course
from bnncli.training.learner import num_batches
from bnncli.training.loop import Save, State, train

if TYPE_CHECKING:
    from torch import Tensor

MIN_ROUND_STEPS = 25  # after which the ELBO is looked at and a state may be saved

# Multiplications a step, below which one thread was as fast as two, and far faster beside other programs.
_SMALL_STEP = 2**21


@dataclass(frozen=True)
class RefineFit:
    """A refined posterior.

    Args:
        posterior: the flow.
        history: (E,), the mean over each epoch of the steps' estimates of the ELBO, nats.
        seconds: wall-clock time of the fit.
        is_early: whether it ended before the last epoch because the ELBO stood still.
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
    """The flow of `length` layers on base that maximises the ELBO of target.

    What is None is the flow's own choice, its `recipe`.

    Args:
        target: the log posterior, with all data.
        base: the Gaussian to start from.
        generator: of the initial layers, the shuffles and the draws.
        flow: kind of layer.
        length: layers.
        epochs: passes over the data, at most.
        batch_size: examples a step; N or more takes all data at once.
        learning_rate: of Adam, falling to 0 as a cosine.
        num_draws: theta drawn a step.
        patience: rounds in which the ELBO may stand still before the training ends early; 0 never ends it.
        space: where the layers act: whitened, theta = m + L F(z), or weight, theta = F(m + L z), as published; auto is
            the kind's own choice.
        settings: of the layers: rank, hidden, scale; those left out or None are the kind's own.
        subspace: of whitened coordinates, where the layers are to act there alone.
        go_on: a flow of the same kind on the same base, of a similar target, whose layers are the first ones.
        state, save: to resume, as in bnncli.training.loop.train.
        progress: advanced once a step.

    Raises:
        NumericError: when the ELBO of an epoch is not finite.
        UsageError: when there is no such flow, or it does not take a setting or the space.
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
    course = Course(choice.epochs, num_batches(learner), patience=patience, round_steps=MIN_ROUND_STEPS)
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
    """Layers that act on what `layout` says, before their first step."""
    target = objective.target
    layers = build_layers(flow, layout, generator, length=choice.length, **settings)
    layers = tuple(layer.to(device=target.device, dtype=target.dtype) for layer in layers)
    sizes = StepSizes(choice.batch_size, choice.num_draws, choice.learning_rate)
    return FlowLearner(objective, layers, sizes, generator=on_device(generator, target.device))


def _threads_for(target: Target, choice: Recipe) -> AbstractContextManager[None]:
    """Where steps are small, one thread."""
    num_multiplications = min(choice.batch_size, target.num_examples) * target.layout.num_params * choice.num_draws
    return single_threaded() if num_multiplications < _SMALL_STEP else nullcontext()
