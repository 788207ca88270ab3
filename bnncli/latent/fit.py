"""The fit of a latent binary network: Adam on the bound, a batch at a time, all repeats at once.

Skaaret-Lund (2022), section 5.1. The hyper-parameters of the prior, where they are learnt (concrete), are those that maximise the
bound with a Beta and an inverse gamma hyper-prior, in closed form after each of the first epochs, and are then frozen.
On a GPU a step is one captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bnncli.errors import NumericError
from bnncli.latent.divergence import Multiplier, bias_divergence, weight_divergence
from bnncli.latent.history import History
from bnncli.latent.learnt_prior import learnt_prior
from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.latent.scaling import Inputs, Scaling
from bnncli.latent.steps import EstimatorSettings, Minibatch, differentiate, workspace_of
from bnncli.lazy import no_grad, torch
from bnncli.numerics.seeds import on_device
from bnncli.progress import SILENT, Progress
from bnncli.targets.stream import FeatureBlocks
from bnncli.training.adam import Adam
from bnncli.training.course import Course
from bnncli.training.learner import num_batches
from bnncli.training.loop import Save, State, train
from bnncli.training.shared_memory import join_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """How to fit.

    Args:
        epochs: passes over the data. batch_size: examples a step.
        learning_rate: of Adam. schedule: constant, or falling to 0 along a cosine.
        inclusion_rate: learning rate of the inclusion logits, for the first `early_epochs`; learning_rate after them.
        flow_rate: learning rate of the multipliers; learning_rate where there is none.
        early_epochs: epochs after which the prior's hyper-parameters are frozen as well.
        hyper_prior: whether those are learnt. prior_weight: of the model's own prior against the weights', see learnt_prior.
        settings: of the estimator.
        shuffles: whether batches are drawn anew each epoch; else they are blocks of consecutive examples.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    schedule: str = "constant"
    inclusion_rate: float | None = None
    flow_rate: float | None = None
    early_epochs: int = 0
    hyper_prior: bool = False
    prior_weight: float = 10.0
    settings: EstimatorSettings = field(default_factory=EstimatorSettings)
    shuffles: bool = True


def fit_latent(
    model: LatentModel,
    features: Tensor,
    labels: Tensor,
    plan: Plan,
    *,
    generator: torch.Generator,
    state: State | None = None,
    save: Save | None = None,
    scaling: Scaling | None = None,
    progress: Progress = SILENT,
    what: str = "fit",
) -> tuple[LatentModel, History]:
    """Fit a model in place; returns it, with its prior as learnt, and what each epoch gave.

    Args:
        model: where to start.
        features: (N, D), on the model's device, or on the CPU and sent there batch by batch.
        labels: (N,) int64, or (N, C) where classes do not exclude each other; where each repeat has labels of its own they are
            (N, R) or (N, R, C), and batches have the same examples.
        plan: how.
        generator: of shuffles and noise; on a GPU one on the CPU seeds another there.
        state, save: to resume, as in bnncli.training.loop.train; there is a state after each epoch.
        scaling: of the features, none by default.
        progress: advanced once a step, with the epoch and the bound of the one before as a note. what: its name there.

    Raises:
        NumericError: when the bound of an epoch is not finite.
    """
    inputs = Inputs(FeatureBlocks(features, model.device), scaling)
    learner = LatentLearner(model, inputs, labels, plan, on_device(generator, model.device))
    course = Course(plan.epochs, num_batches(learner), schedule=plan.schedule)
    train(learner, course, what=what, state=state, save=save, progress=progress)
    for tensor in model.multiplier_parameters():
        tensor.grad = None
    return learner.model, learner.history


class LatentLearner:
    """A model that maximises its bound.

    Args:
        model: to fit in place.
        inputs: of the network, (N, D). labels: see fit_latent.
        plan: how.
        generator: of shuffles and noise, on the model's device.

    Attributes:
        model: with its prior as learnt.
        history: what each epoch gave.
    """

    steps_at_once = 1
    draws_in_steps = True
    is_capturable = True

    def __init__(
        self, model: LatentModel, inputs: Inputs, labels: Tensor, plan: Plan, generator: torch.Generator
    ) -> None:
        self.model, self.plan, self.generator, self.inputs = model, plan, generator, inputs
        self.expected = model.prior  # before anything of it is learnt
        self.labels = labels.to(model.device)
        self.labels_differ = labels.ndim > (1 if model.layout.likelihood.is_exclusive else 2)  # from repeat to repeat
        self.batch_size: int | None = plan.batch_size
        self.shuffles = plan.shuffles
        factors, flows = model.factors, model.multiplier_parameters()
        # Each group is an update of its own: as few as there are learning rates.
        groups = [[factors.logit], [factors.mean, factors.rho, factors.bias_mean, factors.bias_rho]]
        if plan.inclusion_rate is None:
            groups = [groups[0] + groups[1]]
        if flows:
            groups.append([join_memory(flows)])  # Adam would spend more on a hundred small ones
        for tensor in flows:
            tensor.requires_grad_()
        self.optimizer = Adam(groups, model.device)
        self.seen_shape: tuple[int, ...] = (model.num_repeats, 1 + model.layout.num_layers)
        self.history = History()
        self.workspace = workspace_of(model)
        self._order: Tensor | None = None  # of labels, and of features, which may lie elsewhere
        self._order_of_features: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return self.history.num_epochs

    @property
    def objective(self) -> Sequence[float]:
        """The bound of each, the mean of the repeats."""
        return list(self.history.bound().mean(dim=1).tolist())

    @property
    def constants(self) -> object:
        """The prior, whose numbers are in the steps."""
        return self.model.prior

    def rates(self, epoch: int) -> Sequence[float]:
        """Those of the inclusion logits, where they have their own, of the other factors, and of the multipliers."""
        plan = self.plan
        rates = [plan.learning_rate]
        if plan.inclusion_rate is not None:
            rates = [plan.inclusion_rate if epoch < plan.early_epochs else plan.learning_rate, *rates]
        return [*rates, plan.flow_rate or plan.learning_rate] if self.model.multipliers else rates

    def note(self) -> str:
        """The epoch, and the bound of the one before, nats."""
        note = f"epoch {self.num_epochs + 1}/{self.plan.epochs}"
        if self.num_epochs:  # of all data; the mean of the repeats
            note += f", bound {float(self.history.last_bound().mean()):.4g}"
        return note

    def begin_epoch(self, order: Tensor | None) -> None:
        """Batches are cut from this order, or are blocks of consecutive examples."""
        if order is not None:
            self._order, self._order_of_features = (
                order.to(part.device) for part in (self.labels, self.inputs.features.features)
            )

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Nothing: steps draw what they need."""
        return ()

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """Inputs (steps, n, D) and labels (steps, n, ...)."""
        wanted = rows if self._order_of_features is None else self._order_of_features[rows]
        labels = self.labels[rows if self._order is None else self._order[rows]]
        sizes = (num_steps, -1)
        return self.inputs.gather(wanted).unflatten(0, sizes), labels.unflatten(0, sizes)

    def update(self, *parts: Tensor) -> Tensor:
        """What the step saw: log likelihood of the batch, then the flows' part by layer, weighed as they are in it."""
        inputs, labels = parts
        share = len(labels) / self.num_examples
        batch = Minibatch(inputs, labels.movedim(1, 0) if self.labels_differ else labels, share)
        step = differentiate(self.model, batch, self.plan.settings, self.generator, self.workspace)
        self.optimizer.step()
        return torch.cat([step.log_likelihood.double().unsqueeze(1), (step.flow * share).double()], dim=1)

    @no_grad
    def end_round(self, seen: Tensor) -> None:
        """Learn the prior where it is early, then take note of the parts of the bound and of the density."""
        for steps in seen:
            total = torch.zeros_like(steps[0])
            for step in steps:
                total += step
            self._end_epoch(total)

    def _end_epoch(self, seen: Tensor) -> None:
        model, plan = self.model, self.plan
        if plan.hyper_prior and self.num_epochs < plan.early_epochs:
            self.model = model = model.with_prior(learnt_prior(model, self.expected, plan.prior_weight))
        factors, layout = model.factors, model.layout
        density = [part.flatten(1).mean(dim=1) for part in layout.weights(factors.inclusion)]
        self.history.add(
            log_likelihood=seen[:, 0],
            weight_divergence=averaged_divergence(model, self.generator),
            bias_divergence=bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, layout),
            flow_divergence=seen[:, 1:],
            density=torch.stack(density, dim=1),
        )
        if not torch.isfinite(self.history.last_bound()).all():
            raise NumericError(
                f"the bound is not finite in epoch {self.num_epochs}",
                hint=f"use a \0learning_rate\0 below {plan.learning_rate:g}"
                + (f", a \0flow_rate\0 below {plan.flow_rate:g}" if plan.flow_rate is not None else "")
                + (", \0standardize\0, or another \0slab_sd\0 or \0slab_mean\0" if self.num_epochs == 1 else ""),
            )

    def state(self) -> dict[str, Tensor]:
        """The history and the prior."""
        prior = {f"prior.{name}": part.clone() for name, part in self.model.prior.tensors().items()}
        return self.history.tensors() | prior

    def load(self, state: State) -> None:
        """Take up both."""
        self.history = History.from_tensors(state)
        prior = self.model.prior
        parts = {name: state[f"prior.{name}"].to(self.device) for name in prior.tensors()}
        self.model = self.model.with_prior(SpikeAndSlab.from_tensors(parts, prior.bias_sd))


@no_grad
def averaged_divergence(model: LatentModel, generator: torch.Generator, num_draws: int = 256) -> Tensor:
    """The weights' KL (R, L) float64, averaged over draws of the multipliers where there are any."""
    multipliers = []
    for part in model.multipliers:
        noise = torch.randn(
            model.num_repeats, num_draws, part.start_mean.shape[1], generator=generator, device=generator.device
        )
        z = part.draw(noise.to(model.device))[0]
        multipliers.append(Multiplier(z.mean(dim=1), z.square().mean(dim=1)))
    return weight_divergence(model.factors, model.prior, model.layout, multipliers or None)
