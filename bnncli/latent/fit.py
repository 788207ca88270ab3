"""Fit latent binary networks by their evidence lower bound.

The local reparameterisation trick (with or without multipliers) and the concrete relaxation give the gradients; a
search chooses the slab's standard deviation; groups of repeats are fitted on different workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import NumericError
from bnncli.latent.factors import (
    LEAST_VARIANCE,
    Factors,
    Moments,
    MultiplierModel,
    Workspace,
    layer_moments,
    moments,
    product,
)
from bnncli.latent.model import (
    LatentModel,
    Multiplier,
    SpikeAndSlab,
    bias_divergence,
    bias_gradients,
    factor_gradients,
    learn_prior,
    multiplier_gradients,
    weight_divergence,
)
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import on_device
from bnncli.parameters.layouts import NetworkLayout
from bnncli.progress import SILENT, Progress
from bnncli.system.workers import Team, shares
from bnncli.targets.blocks import FeatureBlocks
from bnncli.training.loop import LearningRateSchedule, Save, State, num_batches, train
from bnncli.training.optimizers import Adam, join_memory
from bnncli.training.shared_out import Seat, StoredStates, share_out

if TYPE_CHECKING:
    from torch import Tensor


_PARTS = ("log_likelihood", "weight_divergence", "bias_divergence", "flow_divergence", "density")


@dataclass
class History:
    """Parts of the bound after each epoch, CPU float64: expected log likelihood (R,), divergences and density by layer (R, L)."""

    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in _PARTS})

    @property
    def num_epochs(self) -> int:
        """Return the number of finished epochs."""
        return len(self.parts["density"])

    def add(self, **parts: Tensor) -> None:
        """Append an epoch."""
        for name, value in parts.items():
            self.parts[name].append(value.double().cpu())

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts as tensors (E, R) and (E, R, L), for a file."""
        return {f"history.{name}": torch.stack(values) for name, values in self.parts.items() if values}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> History:
        """Invert tensors()."""
        found = {name: tensors.get(f"history.{name}") for name in _PARTS}
        return cls({name: [] if value is None else list(value.cpu().unbind(0)) for name, value in found.items()})

    def bound(self) -> Tensor:
        """Return the evidence lower bound of each epoch and repeat, (E, R), nats; its likelihood is the epoch's average."""
        return _bound({name: torch.stack(values) for name, values in self.parts.items()})

    def last_bound(self) -> Tensor:
        """Return the bound of the last epoch, (R,), nats."""
        return _bound({name: values[-1] for name, values in self.parts.items()})


def _bound(parts: Mapping[str, Tensor]) -> Tensor:
    divergences = [parts[f"{name}_divergence"].sum(-1) for name in ("weight", "bias", "flow")]
    return parts["log_likelihood"] - torch.stack(divergences).sum(dim=0)


_BLOCK_BYTES = 2**26  # of features in float64 at a time
_ROWS = {"cpu": 1000, "cuda": 20_000}


class Scaling(NamedTuple):
    """x -> (x - shift) / scale; (D,) float32 each."""

    shift: Tensor
    scale: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Standardise features (n, D)."""
        return (features - self.shift) / self.scale

    @classmethod
    def of(cls, features: Tensor, device: torch.device) -> Scaling:
        """Compute mean and standard deviation of each column of features (N, D); the deviation of a constant column is 1.

        Two passes in blocks with float64 sums: for float32 values that are all equal they are exact, and the deviation
        is 0.
        """
        rows = max(1, _BLOCK_BYTES // (8 * features.shape[1]))
        blocks, double = FeatureBlocks(features, device), torch.float64
        sums = [block.sum(dim=0) for _, block in blocks.read(rows, double)]
        mean = torch.stack(sums).sum(dim=0) / len(features)
        squares = [(block - mean).square_().sum(dim=0) for _, block in blocks.read(rows, double)]
        sd = (torch.stack(squares).sum(dim=0) / len(features)).sqrt().float()
        # Subnormal deviations count as 0: their reciprocal may be infinite.
        sd = torch.where(sd > torch.finfo(sd.dtype).tiny, sd, 1.0)
        return cls(mean.float(), sd)


class Inputs(NamedTuple):
    """The inputs of all examples: features on any device, and an optional scaling applied as they are read."""

    features: FeatureBlocks
    scaling: Scaling | None = None

    def gather(self, rows: slice | Tensor) -> Tensor:
        """Return the inputs of some rows, (n, D) float32 on the device; an index (n,) int64 should lie where the features are."""
        return self._scaled(self.features.gather(rows, torch.float32))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order with their inputs (n, D), without gradients, in blocks that fit a CPU's cache."""
        size = _ROWS["cpu" if self.features.device.type == "cpu" else "cuda"]
        for rows, block in self.features.read(size, torch.float32):
            yield rows, self._scaled(block)

    def _scaled(self, features: Tensor) -> Tensor:
        return features if self.scaling is None else self.scaling(features)


def draw_activations(
    inputs: Tensor,
    weight: Moments,
    bias_mean: Tensor,
    bias_variance: Tensor,
    noise: Tensor,
    multiplier: Tensor | None = None,
    *,
    gradient: Moments | None = None,
) -> Tensor:
    """Draw activations (R, n, out): Gaussians with the exact mean and variance of x w^T + b.

    Args:
        inputs: (R, n, in).
        weight: moments of one layer's weights, (R, out, in) each.
        bias_mean, bias_variance: (R, out).
        noise: standard normal, (R, n, out).
        multiplier: z of each input, (R, n, in) or (R, 1, in).
        gradient: as in `product`, of each moment.
    """
    to_mean, to_noise, to_switching = gradient or (None, None, None)
    scaled = inputs if multiplier is None else inputs * multiplier
    mean = product(scaled, weight.mean, bias_mean.unsqueeze(1), to_mean)
    squared = inputs.square()
    variance = product(squared, weight.noise, bias_variance.unsqueeze(1), to_noise)
    if weight.switching is not None:
        other = squared if multiplier is None else scaled.square()
        variance = product(other, weight.switching, variance, to_switching)
    return torch.addcmul(mean, variance.sqrt(), noise)


class Minibatch(NamedTuple):
    """Examples of a step.

    Args:
        features: (n, D).
        labels: (n,) int64 or (n, C); (R, n) or (R, n, C) where the repeats have labels of their own.
        share: n / N, the weight of the divergence.
    """

    features: Tensor
    labels: Tensor
    share: float


class Step(NamedTuple):
    """Parts of the bound from one step, detached.

    Args:
        log_likelihood: of the batch, (R,).
        flow: log q(z) - log r(z | w) by layer, (R, L); 0 without multipliers.
    """

    log_likelihood: Tensor
    flow: Tensor


class EstimatorSettings(NamedTuple):
    """Settings of the gradient estimators.

    Args:
        estimator: lrt, mnf or concrete.
        variance: exact or published, for lrt and mnf.
        temperature: of the relaxed inclusions (concrete). Low temperatures are closer to zeros and ones, but nearly all
          draws then have a zero gradient: at 0.001, the thesis's, all but about one in a thousand.
        multiplier_draws: z drawn a step, each for as many examples (mnf).
    """

    estimator: str = "lrt"
    variance: str = "exact"
    temperature: float = 0.5
    multiplier_draws: int = 10


def differentiate(
    model: LatentModel,
    batch: Minibatch,
    settings: EstimatorSettings,
    generator: torch.Generator,
    workspace: Workspace | None = None,
) -> Step:
    """Set the gradient of minus the batch's share of the bound on every learnt parameter.

    Args:
        workspace: `workspace_of` this model; the gradients of the weights' factors then lie in it.
    """
    space = workspace or workspace_of(model)
    if settings.estimator == "concrete":
        return _differentiate_weights(model, batch, settings, generator, space)
    return _differentiate_moments(model, batch, settings, generator, space)


def workspace_of(model: LatentModel) -> Workspace:
    """Allocate the memory that training steps on a model write to."""
    return Workspace.of(model.factors, model.layout, has_switching=bool(model.multipliers))


class Biases(NamedTuple):
    """Mean and variance of all biases, (R, B) each."""

    mean: Tensor
    variance: Tensor


class _Forward(NamedTuple):
    """Logits (R, n, K), and for every layer with a multiplier its draws z (R, M, in) and log q(z) - log r(z | w) (R, M)."""

    logits: Tensor
    draws: list[Tensor]
    flows: list[Tensor]


def draw_logits(
    model: LatentModel, features: Tensor, weight: Moments, generator: torch.Generator, *, multiplier_draws: int = 10
) -> Tensor:
    """Draw logits (R, n, K) of features (n, D), each layer's activations from their mean and variance."""
    return _forward(model, features, weight, generator, multiplier_draws).logits


def _forward(
    model: LatentModel,
    features: Tensor,
    weight: Moments,
    generator: torch.Generator,
    num_draws: int,
    gradient: Moments | None = None,
    bias: Biases | None = None,
) -> _Forward:
    layout, factors, num_examples = model.layout, model.factors, len(features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(model.num_repeats, *shape, generator=generator, device=generator.device).to(features)

    layers = layer_moments(weight, layout)
    to_layers = [None] * layout.num_layers if gradient is None else layer_moments(gradient, layout)
    biases = zip(*(layout.biases(part) for part in bias or bias_moments(factors)), strict=True)
    hidden = features.expand(model.num_repeats, -1, -1)
    draws, flows = [], []
    for index, (own, (bias_mean, bias_variance)) in enumerate(zip(layers, biases, strict=True)):
        outputs, inputs = layout.shapes[index]
        z = None
        if model.multipliers:
            multiplier = model.multipliers[index]
            count = min(num_draws, num_examples)
            drawn, log_density = multiplier.draw(normal(count, inputs))
            flows.append(log_density - multiplier.log_auxiliary(drawn, own, normal(count, outputs), to_layers[index]))
            draws.append(drawn)
            # Example i has draw i modulo their number. Indexing gives the same, but its gradient is slow (a sort on a
            # GPU).
            z = drawn if count == num_examples else drawn.repeat(1, -(-num_examples // count), 1)[:, :num_examples]
        hidden = draw_activations(
            hidden if index == 0 else hidden.relu(),
            own, bias_mean, bias_variance, normal(num_examples, outputs), z, gradient=to_layers[index],
        )  # fmt: skip
    return _Forward(hidden, draws, flows)


def weight_moments(model: LatentModel, variance: str, workspace: Workspace | None = None) -> Moments:
    """Return the moments of the weights, detached from the graph; without multipliers both variances are merged."""
    return moments(model.factors, model.layout, variance=variance, is_merged=not model.multipliers, workspace=workspace)


@no_grad
def bias_moments(factors: Factors) -> Biases:
    """Return the moments of the biases, detached from the graph."""
    return Biases(factors.bias_mean.detach(), factors.bias_sd.square_().add_(LEAST_VARIANCE))


def _differentiate_moments(
    model: LatentModel, batch: Minibatch, settings: EstimatorSettings, generator: torch.Generator, space: Workspace
) -> Step:
    factors = model.factors
    weight = weight_moments(model, settings.variance, space)
    own = space.gradient if weight.switching is not None else space.gradient._replace(switching=None)
    for part in own:
        if part is not None:
            part.zero_()
    bias = bias_moments(factors)
    for part in bias:
        part.requires_grad_()
    forward = _forward(model, batch.features, weight, generator, settings.multiplier_draws, own, bias)
    fit = model.layout.likelihood.log_likelihoods(forward.logits, batch.labels).sum(dim=1)
    loss, multipliers = -fit.sum(), None
    if model.multipliers:
        divergence = torch.stack(forward.flows).mean(dim=2).sum()
        pulls = multiplier_gradients(weight, factors, model.prior, model.layout, space)
        for z, (first, second) in zip(forward.draws, pulls, strict=True):
            # The part of the weights' divergence that depends on z: linear in its two moments.
            divergence = divergence + (z.mean(dim=1) * first + z.square().mean(dim=1) * second).sum()
        loss = loss + divergence * batch.share
        multipliers = [Multiplier(z.detach().mean(dim=1), z.detach().square().mean(dim=1)) for z in forward.draws]
    rest = model.multiplier_parameters()
    to_mean, to_variance, *gradients = torch.autograd.grad(loss, [*bias, *rest], allow_unused=True)
    to_sd = torch.mul(to_variance, factors.bias_sd.detach()).mul_(2)
    factors.bias_mean.grad, factors.bias_rho.grad = bias_gradients(
        factors, to_mean, to_sd, model.prior, scale=batch.share
    )
    if weight.switching is None and settings.variance == "exact":
        own = own._replace(switching=own.noise)  # one sum of two variances: the same derivative
    factors.mean.grad, factors.rho.grad, factors.logit.grad = factor_gradients(
        factors, own, model.prior, model.layout,
        scale=batch.share, variance=settings.variance, multipliers=multipliers, workspace=space,
    )  # fmt: skip
    for tensor, gradient in zip(rest, gradients, strict=True):
        if gradient is None:  # small_network has already written it
            continue
        if tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad.copy_(gradient)
    flows = [flow.detach().mean(dim=1) for flow in forward.flows]
    return Step(fit.detach(), torch.stack(flows, dim=1) if flows else _no_flow(model, fit))


def _differentiate_weights(
    model: LatentModel, batch: Minibatch, settings: EstimatorSettings, generator: torch.Generator, space: Workspace
) -> Step:
    """Differentiate with relaxed inclusions drawn once for all examples; Maddison et al. (2017), arXiv 1611.00712."""
    factors, layout = model.factors, model.layout
    draw = _draw_relaxed(model, settings.temperature, generator, space)
    noise = _normal_like(factors.bias_mean, generator)
    with torch.no_grad():
        bias = torch.addcmul(factors.bias_mean, factors.bias_sd, noise)
    bias.requires_grad_()
    d_weight = space.gradient.mean.zero_()
    hidden = batch.features.expand(model.num_repeats, -1, -1)
    parts = (layout.weights(draw.weight), layout.weights(d_weight), layout.biases(bias))
    for index, (weight, to_weight, own) in enumerate(zip(*parts, strict=True)):
        hidden = product(hidden.relu() if index else hidden, weight, own.unsqueeze(1), to_weight)
    fit = layout.likelihood.log_likelihoods(hidden, batch.labels).sum(dim=1)
    (to_bias,) = torch.autograd.grad(-fit.sum(), bias)
    factors.bias_mean.grad, factors.bias_rho.grad = bias_gradients(
        factors, to_bias, to_bias * noise, model.prior, scale=batch.share
    )
    factors.mean.grad, factors.rho.grad, factors.logit.grad = factor_gradients(
        factors, None, model.prior, layout, scale=batch.share, workspace=space
    )
    _relaxed_gradient(model, draw, d_weight, settings.temperature, space)
    return Step(fit.detach(), _no_flow(model, fit))


def _no_flow(model: LatentModel, like: Tensor) -> Tensor:
    return like.new_zeros(model.num_repeats, model.layout.num_layers)


class _Relaxed(NamedTuple):
    """Weights drawn as relaxed inclusion times slab, slab = mean + sd noise; (R, W) each."""

    weight: Tensor
    relaxed: Tensor
    noise: Tensor


@no_grad
def _draw_relaxed(model: LatentModel, temperature: float, generator: torch.Generator, space: Workspace) -> _Relaxed:
    factors, layout = model.factors, model.layout
    weight, relaxed, noise = space.moments.mean, space.moments.noise, space.gradient.noise
    _fill(torch.rand, relaxed, generator)
    _fill(torch.randn, noise, generator)
    moments_of = (factors.mean, factors.rho, factors.logit, space.inclusion, space.exclusion, space.sd)
    for _, (mean, rho, logit, alpha, beta, sd, own, z, e) in layout.chunks(*moments_of, weight, relaxed, noise):
        torch.sigmoid(logit, out=alpha)
        torch.neg(logit, out=beta).sigmoid_()
        sd.copy_(torch.nn.functional.softplus(rho))
        logistic = torch.logit(z.clamp_(min=1e-7, max=1 - 1e-7), out=space.blocks_like(mean)[0])
        torch.sub(logit, logistic, out=z).div_(temperature).sigmoid_()
        torch.addcmul(mean, sd, e, out=own).mul_(z)
    return _Relaxed(weight, relaxed, noise)


@no_grad
def _relaxed_gradient(
    model: LatentModel, draw: _Relaxed, d_weight: Tensor, temperature: float, space: Workspace
) -> None:
    """Add the gradient through the drawn weights to the factors' gradients."""
    factors = model.factors
    flats = (factors.rho, *draw, d_weight, space.to_mean, space.to_rho, space.to_logit)
    for _, (rho, weight, z, noise, d_own, to_mean, to_rho, to_logit) in model.layout.chunks(*flats):
        one, other = space.blocks_like(rho)
        torch.mul(d_own, z, out=one)
        to_mean.add_(one)
        to_rho.addcmul_(one.mul_(noise), torch.sigmoid(rho, out=other))
        # slab z (1 - z) / temperature, where slab z is the weight
        torch.sub(1, z, out=one).mul_(weight)
        to_logit.addcmul_(one, d_own, value=1 / temperature)


def _fill(draw: Callable[..., Tensor], to: Tensor, generator: torch.Generator) -> None:
    """Draw into existing memory, always as float32, so that the numbers do not depend on its precision."""
    if to.dtype == torch.float32 and to.device.type == generator.device.type:
        draw(to.shape, generator=generator, out=to)
    else:
        to.copy_(draw(to.shape, generator=generator, device=generator.device))


def _normal_like(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like)


@dataclass(frozen=True)
class Plan:
    """Settings of a fit.

    Args:
        epochs: passes over the data.
        batch_size: examples a step.
        learning_rate: of Adam.
        schedule: constant, or falling to 0 along a cosine.
        inclusion_rate: learning rate of the inclusion logits, for the first `early_epochs`; learning_rate after them.
        flow_rate: learning rate of the multipliers; learning_rate by default.
        early_epochs: epochs after which the prior's hyper-parameters are frozen as well.
        hyper_prior: whether the hyper-parameters are learnt.
        prior_weight: weight of the model's own prior, see learnt_prior.
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
    """Fit a model in place; return it with its learnt prior, and the history of its bound.

    Args:
        model: where to start.
        features: (N, D), on the model's device, or on the CPU and sent there batch by batch.
        labels: (N,) int64, or (N, C) where classes do not exclude each other; (N, R) or (N, R, C) where each repeat has
          labels of its own. Batches have the same examples for all repeats.
        plan: how.
        generator: of shuffles and noise; for a GPU, a CPU generator seeds another there.
        state, save: to resume, as in bnncli.training.loop.train; there is a state after each epoch.
        scaling: of the features, none by default.
        progress: advanced once a step, noting the epoch and the previous epoch's bound.
        what: the task's name in `progress`.

    Raises:
        NumericError: when the bound of an epoch is not finite.
    """
    inputs = Inputs(FeatureBlocks(features, model.device), scaling)
    learner = LatentLearner(model, inputs, labels, plan, on_device(generator, model.device))
    course = LearningRateSchedule(plan.epochs, num_batches(learner), schedule=plan.schedule)
    train(learner, course, what=what, state=state, save=save, progress=progress)
    for tensor in model.multiplier_parameters():
        tensor.grad = None
    return learner.model, learner.history


class LatentLearner:
    """A model that maximises its bound.

    Args:
        model: to fit in place.
        inputs: of the network, (N, D).
        labels: see fit_latent.
        plan: how.
        generator: of shuffles and noise, on the model's device.

    Attributes:
        model: with its learnt prior.
        history: the bound's parts after each epoch.
    """

    steps_at_once = 1
    draws_in_steps = True
    is_capturable = True

    def __init__(
        self, model: LatentModel, inputs: Inputs, labels: Tensor, plan: Plan, generator: torch.Generator
    ) -> None:
        self.model, self.plan, self.generator, self.inputs = model, plan, generator, inputs
        self.expected = model.prior  # the prior before any of it is learnt
        self.labels = labels.to(model.device)
        self.labels_differ = labels.ndim > (1 if model.layout.likelihood.is_exclusive else 2)  # between repeats
        self.batch_size: int | None = plan.batch_size
        self.shuffles = plan.shuffles
        factors, flows = model.factors, model.multiplier_parameters()
        # Each group is an update of its own: use as few as there are learning rates.
        groups = [[factors.logit], [factors.mean, factors.rho, factors.bias_mean, factors.bias_rho]]
        if plan.inclusion_rate is None:
            groups = [groups[0] + groups[1]]
        if flows:
            groups.append([join_memory(flows)])  # Adam is slower on a hundred small tensors
        for tensor in flows:
            tensor.requires_grad_()
        self.optimizer = Adam(groups, model.device)
        self.seen_shape: tuple[int, ...] = (model.num_repeats, 1 + model.layout.num_layers)
        self.history = History()
        self.workspace = workspace_of(model)
        self._order: Tensor | None = None  # of labels, and of features, which may lie on another device
        self._order_of_features: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return self.model.device

    @property
    def num_examples(self) -> int:
        """Return N."""
        return len(self.labels)

    @property
    def num_epochs(self) -> int:
        """Return the number of finished epochs."""
        return self.history.num_epochs

    @property
    def objective(self) -> Sequence[float]:
        """Return the bound of each epoch, averaged over the repeats."""
        return list(self.history.bound().mean(dim=1).tolist())

    @property
    def constants(self) -> object:
        """Return the prior, whose numbers a captured step contains."""
        return self.model.prior

    def rates(self, epoch: int) -> Sequence[float]:
        """Return the learning rates of the inclusion logits (if separate), of the other factors, and of the multipliers."""
        plan = self.plan
        rates = [plan.learning_rate]
        if plan.inclusion_rate is not None:
            rates = [plan.inclusion_rate if epoch < plan.early_epochs else plan.learning_rate, *rates]
        return [*rates, plan.flow_rate or plan.learning_rate] if self.model.multipliers else rates

    def note(self) -> str:
        """Describe the epoch and the previous epoch's bound, nats."""
        note = f"epoch {self.num_epochs + 1}/{self.plan.epochs}"
        if self.num_epochs:  # averaged over the repeats
            note += f", bound {float(self.history.last_bound().mean()):.4g}"
        return note

    def begin_epoch(self, order: Tensor | None) -> None:
        """Cut the batches from this order; without one they are blocks of consecutive examples."""
        if order is not None:
            self._order, self._order_of_features = (
                order.to(part.device) for part in (self.labels, self.inputs.features.features)
            )

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return nothing: steps draw what they need."""
        return ()

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """Return inputs (steps, n, D) and labels (steps, n, ...)."""
        wanted = rows if self._order_of_features is None else self._order_of_features[rows]
        labels = self.labels[rows if self._order is None else self._order[rows]]
        sizes = (num_steps, -1)
        return self.inputs.gather(wanted).unflatten(0, sizes), labels.unflatten(0, sizes)

    def update(self, *parts: Tensor) -> Tensor:
        """Take a step; return the batch's log likelihood and the flows' part by layer, weighted as in the epoch."""
        inputs, labels = parts
        share = len(labels) / self.num_examples
        batch = Minibatch(inputs, labels.movedim(1, 0) if self.labels_differ else labels, share)
        step = differentiate(self.model, batch, self.plan.settings, self.generator, self.workspace)
        self.optimizer.step()
        return torch.cat([step.log_likelihood.double().unsqueeze(1), (step.flow * share).double()], dim=1)

    @no_grad
    def end_round(self, seen: Tensor) -> None:
        """Record the epoch's parts of the bound and the density, after learning the prior in early epochs."""
        for steps in seen:
            total = torch.zeros_like(steps[0])
            for step in steps:
                total += step
            self._end_epoch(total)

    def _end_epoch(self, seen: Tensor) -> None:
        model, plan = self.model, self.plan
        if plan.hyper_prior and self.num_epochs < plan.early_epochs:
            self.model = model = model.with_prior(learn_prior(model, self.expected, plan.prior_weight))
        factors, layout = model.factors, model.layout
        density = [part.flatten(1).mean(dim=1) for part in layout.weights(factors.inclusion)]
        self.history.add(
            log_likelihood=seen[:, 0],
            weight_divergence=average_divergence(model, self.generator),
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
        """Return the history and the prior."""
        prior = {f"prior.{name}": part.clone() for name, part in self.model.prior.tensors().items()}
        return self.history.tensors() | prior

    def load(self, state: State) -> None:
        """Restore the history and the prior."""
        self.history = History.from_tensors(state)
        prior = self.model.prior
        parts = {name: state[f"prior.{name}"].to(self.device) for name in prior.tensors()}
        self.model = self.model.with_prior(SpikeAndSlab.from_tensors(parts, prior.bias_sd))


@no_grad
def average_divergence(model: LatentModel, generator: torch.Generator, num_draws: int = 256) -> Tensor:
    """Return the weights' KL (R, L) float64, averaged over draws of the multipliers."""
    multipliers = []
    for part in model.multipliers:
        noise = torch.randn(
            model.num_repeats, num_draws, part.start_mean.shape[1], generator=generator, device=generator.device
        )
        z = part.draw(noise.to(model.device))[0]
        multipliers.append(Multiplier(z.mean(dim=1), z.square().mean(dim=1)))
    return weight_divergence(model.factors, model.prior, model.layout, multipliers or None)


# Geometric: neighbours differ by 1.9, which hardly changes a posterior.
CANDIDATES = tuple(0.01 * 300 ** (i / 9) for i in range(10))
NUM_NETWORKS = 10  # of a prediction
EPOCHS_SHARE = 0.1  # of the fit's epochs for each candidate, and at least MIN_EPOCHS
MIN_EPOCHS = 5


def search_epochs(epochs: int) -> int:
    """Return how many epochs each candidate of the search gets."""
    return min(epochs, max(MIN_EPOCHS, round(EPOCHS_SHARE * epochs)))


@no_grad
def nll_of_repeats(
    model: LatentModel,
    features: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    scaling: Scaling | None = None,
) -> Tensor:
    """Return the mean NLL (R,) float64 of labels (N,) or (N, C) under the mean probability of NUM_NETWORKS networks of each repeat.

    Args:
        features: (N, D), on the model's device or the CPU.
        labels: on the model's device.
        scaling: of the features, none by default.
    """
    layout, found = model.layout, []
    inputs = Inputs(FeatureBlocks(features, model.device), scaling)
    for repeat in range(model.num_repeats):
        repeats = torch.full((NUM_NETWORKS,), repeat, device=model.device)
        theta = layout.join(*model.draw_weights(repeats, generator))
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        for rows, block in inputs.blocks():
            logits = layout.logits(block, theta)
            if layout.likelihood.is_exclusive:
                single = layout.likelihood.log_likelihoods(logits, labels[rows]).double()
            else:  # each label by itself, as it is predicted: draws (S, n L)
                decisions = layout.likelihood.decision_logs(logits.permute(2, 0, 1), labels[rows]).double()
                single = decisions.transpose(0, 1).flatten(1)
            losses = math.log(NUM_NETWORKS) - torch.logsumexp(single, dim=0)
            total += losses.sum() * len(block) / len(losses)
        found.append(total / len(features))
    return torch.stack(found)


# The most weights of a group's networks together, where a group has several. On one core, ten networks one by one take,
# compared with a batch of them, 6 times as long with 840 weights, three times with 5,120, 1.5 times with 20,480, 1.3
# times with 40,400 and as long with 128,000. On a GPU, steps of fewer than some millions of weights wait for kernel
# launches.
GROUP_WEIGHTS = {"cpu": 2**16, "cuda": 2**22}


def split_repeats(layout: NetworkLayout, num_repeats: int, device: torch.device) -> list[slice]:
    """Return the repeats of each group, split as evenly as possible."""
    count = -(-num_repeats // largest_group(layout, num_repeats, device))
    return [slice(part.start, part.stop) for part in shares(num_repeats, count)]


def largest_group(layout: NetworkLayout, num_repeats: int, device: torch.device) -> int:
    """Return how many repeats a group has at most."""
    weights = GROUP_WEIGHTS.get(device.type, GROUP_WEIGHTS["cpu"])
    return min(num_repeats, max(1, weights // layout.num_weights))


def fit_apart(
    team: Team,
    start: LatentModel,
    fit: Callable[[LatentModel, int, Seat], Mapping[str, Tensor]],
    *,
    what: str,
    num_steps: int,
    progress: Progress,
    stored: StoredStates | None = None,
) -> list[dict[str, Tensor]]:
    """Fit each group of repeats on one of the workers; return all results on every worker.

    Args:
        start: of all repeats; each group continues from its own part.
        fit: fits a group, given its start, the number of its first repeat, and its seat among the workers.
        what, num_steps, progress, stored: see share_out.

    Raises:
        BnnError: as share_out.
    """
    groups = split_repeats(start.layout, start.num_repeats, start.device)

    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        return fit(start.of_repeats(groups[number]), groups[number].start, seat)

    labels = [_label(rows, start.num_repeats) for rows in groups]
    return share_out(team, labels, work, what=what, num_steps=num_steps, progress=progress, stored=stored)


def fit_tensors(model: LatentModel, history: History) -> dict[str, Tensor]:
    """Return the tensors of a fitted group."""
    prior = {name: part.expand(model.num_repeats, -1) for name, part in model.prior.tensors().items()}
    return dict(model.tensors()) | {f"prior.{name}": part for name, part in prior.items()} | history.tensors()


def join_models(start: LatentModel, groups: Sequence[Mapping[str, Tensor]], *, has_learnt_prior: bool) -> LatentModel:
    """Join the groups (their fit_tensors) into the model of all repeats, on the device of their start."""

    def of_all(name: str) -> Tensor:
        parts = [one[name] for one in groups]
        return (parts[0] if name.endswith("mask") else torch.cat(parts)).to(start.device)

    factors = Factors(**{name: of_all(name) for name in start.factors.tensors()})
    prior = start.prior
    if has_learnt_prior:
        prior = SpikeAndSlab.from_tensors({name: of_all(f"prior.{name}") for name in prior.tensors()}, prior.bias_sd)
    multipliers = [
        MultiplierModel.from_tensors({name: of_all(f"multiplier.{index}.{name}") for name, _ in one.tensors()})
        for index, one in enumerate(start.multipliers)
    ]
    return LatentModel(start.layout, factors, prior, tuple(multipliers))


def join_histories(groups: Sequence[Mapping[str, Tensor]]) -> History:
    """Join the groups' histories into that of all repeats."""
    names = [name for name in groups[0] if name.startswith("history.")]
    return History.from_tensors({name: torch.cat([one[name] for one in groups], dim=1) for name in names})


def _label(rows: slice, num_repeats: int) -> str:
    """Name a group in messages."""
    first, last = rows.start + 1, rows.stop
    return f"network {first} of {num_repeats}" if first == last else f"networks {first} to {last} of {num_repeats}"
