"""The fit of a latent binary network: Adam on the bound, a batch at a time, all repeats at once.

Skaaret-Lund (2022), section 5.1. The hyper-parameters of the prior, where they are learnt (concrete), are those that maximise the
bound with a Beta and an inverse gamma hyper-prior, in closed form after each of the first epochs, and are then frozen.
On a GPU a step is one captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bnncli.errors import Interrupted, NumericError
from bnncli.latent.divergence import Multiplier, bias_divergence, weight_divergence
from bnncli.latent.graph import GraphSteps
from bnncli.latent.learnt_prior import learnt_prior
from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.latent.scaling import Scaling, take
from bnncli.latent.steps import Batch, Settings, Step, differentiate, workspace_of
from bnncli.numerics.seeds import on_device
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.pinned_rows import PinnedRows
from bnncli.training.adam import adam_tensors, load_adam
from bnncli.training.shared_memory import join_memory

State = Mapping[str, Tensor]
Save = Callable[[State, bool], None]

_PARTS = ("log_likelihood", "weight_divergence", "bias_divergence", "flow_divergence", "density")


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
    settings: Settings = field(default_factory=Settings)
    shuffles: bool = True


@dataclass
class History:
    """What each epoch gave, CPU float64: the expected log likelihood (R,), divergences and density by layer (R, L)."""

    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in _PARTS})

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.parts["density"])

    def add(self, **parts: Tensor) -> None:
        """One more epoch."""
        for name, value in parts.items():
            self.parts[name].append(value.double().cpu())

    def tensors(self) -> dict[str, Tensor]:
        """(E, R) and (E, R, L), for a file."""
        return {f"history.{name}": torch.stack(values) for name, values in self.parts.items() if values}

    @classmethod
    def from_tensors(cls, tensors: State) -> History:
        """The inverse of tensors()."""
        found = {name: tensors.get(f"history.{name}") for name in _PARTS}
        return cls({name: [] if value is None else list(value.cpu().unbind(0)) for name, value in found.items()})

    def bound(self) -> Tensor:
        """The evidence lower bound of each epoch and repeat, (E, R), nats; the likelihood's part is the epoch's average."""
        return _bound({name: torch.stack(values) for name, values in self.parts.items()})

    def last_bound(self) -> Tensor:
        """That of the last epoch, (R,), nats."""
        return _bound({name: values[-1] for name, values in self.parts.items()})


def _bound(parts: Mapping[str, Tensor]) -> Tensor:
    divergences = [parts[f"{name}_divergence"].sum(-1) for name in ("weight", "bias", "flow")]
    return parts["log_likelihood"] - torch.stack(divergences).sum(dim=0)


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
        features: (N, D), on the model's device, or on the CPU and sent there batch by batch. labels: (N,) int64.
        plan: how.
        generator: of shuffles and noise; on a GPU one on the CPU seeds another there.
        state: of an interrupted fit; the result is that of an uninterrupted one, bit for bit.
        save: called with the state after each epoch, and with True when the fit is interrupted.
        scaling: of the features, none by default.
        progress: advanced once a step, with the epoch and the bound of the one before as a note. what: its name there.

    Raises:
        NumericError: when the bound of an epoch is not finite.
    """
    fit = _Fit(model, (features, labels), plan, on_device(generator, model.device), scaling, warn=progress.warn)
    if state is not None:
        fit.load(state)
    task = progress.task(what, plan.epochs * fit.num_batches)
    task.advance(fit.history.num_epochs * fit.num_batches)
    kept = fit.state()
    try:
        while fit.history.num_epochs < plan.epochs:
            fit.run_epoch(task)
            kept = fit.state()
            if save is not None:
                save(kept, False)
    except Interrupted:
        if save is not None:
            save(kept, True)
        raise
    for parameter in (*fit.parameters, *fit.flows):
        parameter.grad = None
    return fit.model, fit.history


class _Fit:
    """Model, optimizer, random state and history: all that a state holds."""

    def __init__(
        self,
        model: LatentModel,
        data: tuple[Tensor, Tensor],
        plan: Plan,
        generator: torch.Generator,
        scaling: Scaling | None,
        *,
        warn: Callable[[str], None] = SILENT.warn,
    ) -> None:
        self.model, self.plan, self.generator, self.scaling = model, plan, generator, scaling
        self.expected = model.prior  # before anything of it is learnt
        self.features, self.labels = data[0], data[1].to(model.device)
        self.num_examples = len(self.features)
        self.num_batches = -(-self.num_examples // plan.batch_size)
        factors = model.factors
        others = [factors.mean, factors.rho, factors.bias_mean, factors.bias_rho]
        self.flows = model.multiplier_parameters()
        flows = [join_memory(self.flows)] if self.flows else []  # Adam would spend more on a hundred small ones
        for tensor in self.flows:
            tensor.requires_grad_()
        self.parameters = [factors.logit, *others, *flows]
        self.rates = [torch.tensor(plan.learning_rate, device=model.device) for _ in range(3)]
        self.rates_now: tuple[float, ...] = (plan.learning_rate,) * 3
        groups: list[dict[str, Any]] = [{"params": [factors.logit, *others], "lr": self.rates[1]}]
        if plan.inclusion_rate is not None:  # each group is an update of its own
            groups = [{"params": [factors.logit], "lr": self.rates[0]}, {"params": others, "lr": self.rates[1]}]
        if flows:
            groups.append({"params": flows, "lr": self.rates[2]})
        is_cuda = model.device.type == "cuda"
        self.optimizer = torch.optim.Adam(groups, fused=True, capturable=is_cuda)
        self.history = History()
        self.workspace = workspace_of(model)
        self.steps = GraphSteps(self, plan.batch_size, warn=warn) if is_cuda else None
        is_streamed = is_cuda and self.features.device.type == "cpu"
        self.streamed = PinnedRows(self.features, model.device, plan.batch_size) if is_streamed else None

    def run_epoch(self, task: Task) -> None:
        """One pass over the data."""
        model, plan = self.model, self.plan
        done = self.history.num_epochs
        fit = torch.zeros(model.num_repeats, dtype=torch.float64, device=model.device)
        flow = torch.zeros(model.num_repeats, model.layout.num_layers, dtype=torch.float64, device=model.device)
        note = f"epoch {done + 1}/{plan.epochs}"
        if done:  # of all data, nats; the mean of the repeats
            note += f", bound {float(self.history.last_bound().mean()):.4g}"
        order = None
        if plan.shuffles:
            order = torch.randperm(self.num_examples, generator=self.generator, device=self.generator.device)
        order_of_features = order if self.streamed is None or order is None else order.cpu()
        for index in range(self.num_batches):
            self._set_rates(done * self.num_batches + index)
            rows = slice(index * plan.batch_size, min((index + 1) * plan.batch_size, self.num_examples))
            batch = self._batch(rows, order, order_of_features)
            step = self.step(batch) if self.steps is None else self.steps(batch)
            fit += step.log_likelihood
            if step.flow.shape[1]:
                flow += step.flow * batch.share
            task.advance(note=note)
        self._close_epoch(fit, flow)

    def step(self, batch: Batch) -> Step:
        """Gradients, and Adam's update."""
        step = differentiate(self.model, batch, self.plan.settings, self.generator, self.workspace)
        self.optimizer.step()
        return step

    def _batch(self, rows: slice, order: Tensor | None, order_of_features: Tensor | None) -> Batch:
        """Rows of an epoch's order, which features that are streamed need on the CPU and labels on the device."""
        share = (rows.stop - rows.start) / self.num_examples
        wanted = rows if order_of_features is None else order_of_features[rows]
        device = self.model.device
        if self.streamed is None:
            features = take(self.features, wanted, device, self.scaling)
        else:
            features = take(self.streamed.take(wanted), slice(None), device, self.scaling)
        return Batch(features, self.labels[rows if order is None else order[rows].to(device)], share)

    def _set_rates(self, step: int) -> None:
        plan = self.plan
        is_early = step < plan.early_epochs * self.num_batches
        first = plan.learning_rate if plan.inclusion_rate is None or not is_early else plan.inclusion_rate
        factor = 1.0
        if plan.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * step / (plan.epochs * self.num_batches)))
        rates = tuple(rate * factor for rate in (first, plan.learning_rate, plan.flow_rate or plan.learning_rate))
        if rates != self.rates_now:
            self.rates_now = rates
            for tensor, rate in zip(self.rates, rates, strict=True):
                tensor.fill_(rate)

    @torch.no_grad()
    def _close_epoch(self, fit: Tensor, flow: Tensor) -> None:
        model, plan = self.model, self.plan
        if plan.hyper_prior and self.history.num_epochs < plan.early_epochs:
            self.model = model = model.with_prior(learnt_prior(model, self.expected, plan.prior_weight))
        factors, layout = model.factors, model.layout
        density = [part.flatten(1).mean(dim=1) for part in layout.weights(factors.inclusion)]
        self.history.add(
            log_likelihood=fit,
            weight_divergence=self._divergence(),
            bias_divergence=bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, layout),
            flow_divergence=flow,
            density=torch.stack(density, dim=1),
        )
        if not torch.isfinite(self.history.last_bound()).all():
            raise NumericError(
                f"the bound is not finite in epoch {self.history.num_epochs}",
                hint=f"use a --learning-rate below {plan.learning_rate:g}"
                + (f", a --flow-rate below {plan.flow_rate:g}" if plan.flow_rate is not None else "")
                + (", --standardize, or another --slab-sd or --slab-mean" if self.history.num_epochs == 1 else ""),
            )

    def _divergence(self) -> Tensor:
        """The weights' KL (R, L); with multipliers, averaged over draws of them."""
        return averaged_divergence(self.model, self.generator)

    def state(self) -> dict[str, Tensor]:
        """Copies of everything."""
        tensors = {"generator": self.generator.get_state(), **self.history.tensors()}
        tensors |= {f"prior.{name}": part.clone() for name, part in self.model.prior.tensors().items()}
        return tensors | adam_tensors(self.optimizer)

    def load(self, state: State) -> None:
        """Take up a state."""
        self.generator.set_state(state["generator"].cpu())
        self.history = History.from_tensors(state)
        prior = self.model.prior
        parts = {name: state[f"prior.{name}"].to(self.model.device) for name in prior.tensors()}
        self.model = self.model.with_prior(SpikeAndSlab.from_tensors(parts, prior.bias_sd))
        load_adam(self.optimizer, state)


@torch.no_grad()
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
