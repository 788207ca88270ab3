"""Mean-field variational inference: independent Gaussians that maximise the ELBO, by stochastic gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from bnncli.errors import NumericError, UsageError
from bnncli.inference.mode import conjugate_gradients
from bnncli.inference.refine import TargetLearner
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import on_device
from bnncli.parameters.layouts import HeadLayout, LogitLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.structures.diag import Diag
from bnncli.targets.target import CurvedTarget
from bnncli.training.loop import LearningRateSchedule, Save, State, num_batches, train
from bnncli.training.optimizers import Adam

if TYPE_CHECKING:
    from torch import Tensor, nn


LOCAL, FLIPOUT = "local", "flipout"
_LEAST_VARIANCE = 1e-24  # under a root, whose slope at zero is infinite
# Maps mean (P,) and standard deviations (P,) of theta and inputs (B, ...) to sampled logits (B, K), differentiably.
LogitDraws: TypeAlias = "Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]"


def logit_draws(layout: LogitLayout, estimator: str) -> LogitDraws:
    """Return the function that samples logits with an estimator.

    Args:
        layout: of a head, or of network parameters that all belong to linear layers or, for flipout, convolutions.
        estimator: local or flipout.

    Raises:
        UsageError: a chosen parameter belongs to another kind of layer.
    """
    if layout.head is not None:
        return _of_head(layout.head, estimator)
    return _of_network(cast(ModuleLayout, layout), estimator)


def _of_head(layout: HeadLayout, estimator: str) -> LogitDraws:
    def logits(mean: Tensor, sd: Tensor, features: Tensor, generator: torch.Generator) -> Tensor:
        inputs = layout.augment_features(features)
        return inputs @ layout.augment(mean).T + _noise(
            lambda x, weight: x @ weight.T, inputs, layout.augment(sd), estimator, generator
        )

    return logits


def _noise(
    product: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    sd: Tensor,
    estimator: str,
    generator: torch.Generator,
) -> Tensor:
    """Return the noise to add to the product of inputs (B, in, ...) with mean weights (out, in, ...)."""
    if estimator == LOCAL:
        variance = product(inputs.square(), sd.square()).clamp_min(_LEAST_VARIANCE)
        return variance.sqrt() * _normal(variance.shape, inputs, generator)
    places = (1,) * (sd.ndim - 2)
    draw = sd * _normal(sd.shape, inputs, generator)
    # A weight of a grouped convolution sees one group's channels; all inputs get signs.
    turned = product(inputs * _signs((len(inputs), inputs.shape[1], *places), inputs, generator), draw)
    return turned * _signs((len(inputs), len(sd), *places), inputs, generator)


def _of_network(layout: ModuleLayout, estimator: str) -> LogitDraws:
    network = layout.network
    assert network is not None
    modules = {
        part.name.rpartition(".")[0]: network.module.get_submodule(part.name.rpartition(".")[0])
        for part in layout.parts
    }
    kinds = (
        (torch.nn.Linear,)
        if estimator == LOCAL
        else (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    )
    for name, module in modules.items():
        if not isinstance(module, kinds):
            also = " and convolutions" if estimator == FLIPOUT else ""
            raise UsageError(
                f"\0estimator\0 {estimator} supports only linear layers{also}; {name or 'the network'} is "
                f"{type(module).__name__}",
                hint="use \0estimator\0 reparam"
                + ("" if estimator == FLIPOUT else " or flipout, or limit \0layers\0 to these"),
            )

    def logits(mean: Tensor, sd: Tensor, inputs: Tensor, generator: torch.Generator) -> Tensor:
        shaped = network.shaped(inputs, layout.input_shape)
        with _perturb_outputs(modules, layout.split(sd), estimator, generator):
            return network(shaped, layout.split(mean))

    return logits


@contextmanager
def _perturb_outputs(
    modules: Mapping[str, nn.Module], sds: Mapping[str, Tensor], estimator: str, generator: torch.Generator
) -> Iterator[None]:
    """Add the weight noise to the outputs of these modules within this context; each may be used once."""
    used: set[str] = set()

    def hook_of(name: str) -> Callable[..., Tensor]:
        weight, bias = (sds.get(f"{name}.{part}".lstrip(".")) for part in ("weight", "bias"))

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            (inputs,) = args
            if name in used or (isinstance(module, torch.nn.Linear) and inputs.ndim != 2):
                raise UsageError(
                    f"\0estimator\0 {estimator}: {name} shares its weights across several positions of each example",
                    hint="use \0estimator\0 reparam",
                )
            used.add(name)
            if weight is not None:
                output = output + _noise(_product_of(module), inputs, weight, estimator, generator)
            if bias is not None:  # one draw per example, shared by all its positions
                places = (1,) * (output.ndim - 2)
                draw = bias * _normal((len(output), len(bias)), output, generator)
                output = output + draw.view(*draw.shape, *places)
            return output

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _product_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the module's product of inputs and weights, without bias."""
    if isinstance(module, torch.nn.Linear):
        return torch.nn.functional.linear
    convolution = cast(torch.nn.Conv2d, module)
    return lambda inputs, weight: convolution._conv_forward(inputs, weight, None)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return made.to(like.device)


def _signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return made.to(like).mul_(2).sub_(1)


LEAST_GAIN = 0.5  # nats of the objective below its maximum: a mean off by one standard deviation in one direction
LEAST_GAIN_EACH = 1e-3  # the same per parameter, if there are many
_PAIRS = 16  # draws in each of two independent estimates of the gradient
_NUMBERS_AT_ONCE = 2**20  # values of theta in the draws of a pair of blocks
_SOLVED_TO = 0.05  # relative accuracy of the system with the Hessian
START_SHARE = 0.1  # of the prior's standard deviations: the initial s
MOMENTUM = 0.9  # IVON's beta_1
MIN_ROUND_STEPS = 25  # steps between checks of the ELBO and saved states


@dataclass(frozen=True)
class ViPlan:
    """Training settings of q.

    Args:
        epochs: limit on passes over the data.
        batch_size: examples per step.
        learning_rate: initial rate, decaying to 0 along a cosine.
        num_draws: thetas drawn per step, for the estimator reparam.
        estimator: reparam, local or flipout.
        optimizer: adam or ivon; ivon supports only reparam.
        kl_weight: w.
        patience: rounds without improvement before training stops early; 0 for never.
        hessian_decay: beta_2 of IVON.
        stiffness: largest curvature of the target at the start, which keeps IVON's first steps stable; 0 if unknown.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    num_draws: int = 1
    estimator: str = "reparam"
    optimizer: str = "adam"
    kl_weight: float = 1.0
    patience: int = 0
    hessian_decay: float = 0.9995
    stiffness: float = 0.0


@dataclass(frozen=True)
class ViFit:
    """The result of a fit.

    Args:
        gaussian: q, with diagonal covariance.
        history: (E,), mean objective estimate of each epoch, nats.
        is_early: whether it stopped early because the objective plateaued.
        doubt: why more epochs may help, as in LearningRateSchedule.doubt (a `shortfall` is more reliable); else None.
    """

    gaussian: Gaussian
    history: Tensor
    is_early: bool
    doubt: str | None


def fit_vi(
    target: CurvedTarget,
    plan: ViPlan,
    *,
    start: Tensor,
    generator: torch.Generator,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> ViFit:
    """Fit q, with mean initialised at start (P,) and standard deviations at a tenth of the prior's.

    Args:
        generator: random generator of shuffles and draws.
        state, save: for resuming, as in bnncli.training.loop.train.
        progress: advances once per step.

    Raises:
        NumericError: the objective of an epoch is not finite.
        UsageError: the estimator does not support the layers.
    """
    learner = _MeanField(target, plan, start, on_device(generator, target.device))
    course = LearningRateSchedule(
        plan.epochs, num_batches(learner), patience=plan.patience, round_steps=MIN_ROUND_STEPS
    )
    train(learner, course, what="vi", state=state, save=save, progress=progress)
    variances = learner.log_sd.detach().double().exp().square()
    gaussian = Gaussian(learner.mean.detach().double(), Diag(variances), target.layout, target.prior)
    return ViFit(gaussian, torch.tensor(learner.seen), course.is_early, course.doubt(learner.seen))


@dataclass(frozen=True)
class Shortfall:
    """Distance of an objective from its maximum.

    Args:
        value: nats, by a quadratic model at the end; unbiased under the model, so possibly negative.
        standard_error: nats, due to the draws.
    """

    value: float
    standard_error: float

    def is_large(self, num_params: int) -> bool:
        """Return whether it is significantly more than acceptable for num_params parameters."""
        return self.value - 2 * self.standard_error > max(LEAST_GAIN, LEAST_GAIN_EACH * num_params)


def estimate_shortfall(
    target: CurvedTarget, gaussian: Gaussian, *, kl_weight: float = 1.0, generator: torch.Generator
) -> Shortfall:
    """Estimate by how much the objective of independent Gaussians can rise, from its full gradient: g^T H^{-1} g / 2.

    For means, H is the target's Hessian, by conjugate gradients; for log standard deviations, 2 w each, as at the
    maximum. The product of two independent antithetic gradient estimates avoids squared noise.

    Args:
        target: concave log posterior.
        gaussian: with diagonal covariance.
        kl_weight: w.
    """
    mean, sd = gaussian.mean, gaussian.covariance.variances.sqrt()  # type: ignore[attr-defined]
    precisions, prior = target.prior.diagonal(target.layout, device=target.device), target.prior
    size = _NUMBERS_AT_ONCE // len(mean)

    def likelihood_gradient(theta: Tensor) -> Tensor:
        """Return gradients of draws (S, P), (S, P)."""
        return target.log_joint_and_grad(theta)[1].double() - prior.gradient(theta, target.layout)

    def estimate() -> tuple[Tensor, Tensor]:
        """Return means over pairs, and their variances, of the gradients with respect to m / s and log s, (2, P) each."""
        total, squares = mean.new_zeros(2, len(mean)), mean.new_zeros(2, len(mean))
        for count in [1] * _PAIRS if size < _PAIRS else [_PAIRS]:
            noise = torch.randn(count, len(mean), generator=generator, dtype=torch.float64).to(mean.device)
            above, below = likelihood_gradient(mean + sd * noise), likelihood_gradient(mean - sd * noise)
            to_mean = sd * ((above + below) / 2 + kl_weight * prior.gradient(mean, target.layout))
            to_log_sd = (above - below) / 2 * noise * sd + kl_weight * (1 - precisions * sd.square())
            drawn = torch.stack([to_mean, to_log_sd])
            total += drawn.sum(dim=1)
            squares += drawn.square().sum(dim=1)
        average = total / _PAIRS
        return average, (squares / _PAIRS - average.square()).clamp_min(0) / (_PAIRS - 1)

    (one, variance), (other, its_variance) = estimate(), estimate()
    multiply, beside = target.hessian_operator(mean), (kl_weight - 1) * precisions
    white, _ = conjugate_gradients(
        lambda v: sd * (multiply(sd * v) + beside * sd * v), other[0].unsqueeze(0), _SOLVED_TO
    )
    value = 0.5 * float(one[0] @ white[0]) + float(one[1] @ other[1]) / (4 * kl_weight)
    # Variance of a product of two independent estimates; for the means as if H were diagonal.
    noise = variance * its_variance + variance * other.square() + its_variance * one.square()
    of_means, of_spreads = noise.sum(dim=1).tolist()
    return Shortfall(value, math.sqrt(0.5**2 * of_means + (0.25 / kl_weight) ** 2 * of_spreads))


class _MeanField(TargetLearner):
    """m and log s, (P,) each; with IVON log s follows from the curvatures, in the optimizer's state beside m."""

    def __init__(self, target: CurvedTarget, plan: ViPlan, start: Tensor, generator: torch.Generator) -> None:
        prior = target.prior.to(target.device)
        self.precisions = prior.diagonal(target.layout, device=target.device)
        self.prior_mean = None if prior.mean is None else prior.mean.to(target.dtype)
        self.mean = start.to(target.device, target.dtype, copy=True).requires_grad_()
        self.log_sd = (math.log(START_SHARE) - 0.5 * self.precisions.log()).to(target.dtype).requires_grad_()
        optimizer = Adam([[self.mean, self.log_sd]], target.device)
        self.draws_in_steps = plan.estimator != "reparam"
        super().__init__(target, optimizer, generator, batch_size=plan.batch_size, num_draws=plan.num_draws)
        self.plan, self.curved, self.seen = plan, target, list[float]()
        self.precisions = self.precisions.to(target.dtype)
        self.scale = plan.kl_weight / target.num_examples  # weight of the divergence relative to the mean loss
        if plan.optimizer == "ivon":
            # A step divides by these; under a weak prior, from whose spread they are initialised, the first steps would
            # diverge.
            least = plan.learning_rate * plan.stiffness / target.num_examples
            curvature = (self.scale * (torch.exp(-2 * self.log_sd.detach()) - self.precisions)).clamp(min=least)
            for part, own in (
                (self.mean, {"momentum": torch.zeros_like(self.mean), "curvature": curvature}),
                (self.log_sd, {}),
            ):
                self.optimizer.state[part] = {"step": torch.zeros((), dtype=torch.float32, device=target.device), **own}
        self._every: tuple[Tensor, ...] = ()
        if self.draws_in_steps:
            self._logits = logit_draws(target.layout, plan.estimator)  # type: ignore[arg-type]
            if self.batch_size is None:  # each example has its own draws, so all form one batch
                self._every = target.examples(torch.arange(target.num_examples, device=target.device))

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.seen)

    @property
    def objective(self) -> Sequence[float]:
        """Objective estimate of each epoch."""
        return self.seen

    def rates(self, epoch: int) -> Sequence[float]:
        """Return one learning rate for all parameters."""
        return (self.plan.learning_rate,)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Draw standard normals (steps, S, P); none if steps draw themselves."""
        if self.draws_in_steps:
            return ()
        return (self.normal(num_steps, self.plan.num_draws, self.target.layout.num_params),)

    @no_grad
    def update(self, *parts: Tensor) -> Tensor:
        """Take one step; return the objective estimate before, float64."""
        if self.plan.optimizer == "ivon":
            return self._ivon(*parts)
        likelihood, to_mean, to_sd = self._drawn_logits(*parts) if self.draws_in_steps else self._drawn(*parts)
        sd, weight = self.log_sd.exp(), self.plan.kl_weight
        self.mean.grad = weight * self.precisions * self._away() - to_mean
        self.log_sd.grad = weight * (self.precisions * sd.square() - 1) - to_sd * sd
        objective = likelihood - weight * self._divergence(sd)
        self.optimizer.step()
        return objective

    def _drawn(self, noise: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log likelihood averaged over draws from noise (S, P), and its gradients with respect to m and s."""
        theta = self.mean + self.log_sd.exp() * noise
        value, gradient = self._log_likelihood(theta, *batch)
        return value.mean(), gradient.mean(dim=0), (gradient * noise).mean(dim=0)

    def _log_likelihood(self, theta: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch's estimate of the full log likelihood, (S,), and its gradient (S, P), for theta (S, P)."""
        target = self.curved
        value, gradient = self.joint(*batch).log_joint_and_grad(theta)
        prior = target.prior
        own = gradient.to(theta.dtype) - prior.gradient(theta, target.layout)
        return value.double() - prior.log_density(theta, target.layout), own

    def _drawn_logits(self, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, with logits sampled per example."""
        inputs, labels = batch or self._every
        likelihood = self.target.layout.likelihood  # type: ignore[attr-defined]
        with torch.enable_grad():
            sd = self.log_sd.exp().detach().requires_grad_()
            mean = self.mean.detach().requires_grad_()
            logits = self._logits(mean, sd, inputs, self.generator)
            indicators = (
                labels
                if labels.ndim == 2 and labels.is_floating_point()
                else likelihood.indicators(labels, logits.dtype).T
            )
            turned = logits.detach().T.unsqueeze(1).contiguous()
            normalizers, probabilities = likelihood.normalize_(turned)
            residuals = indicators - probabilities[:, 0].T
            scale = self.num_examples / len(inputs)
            to_mean, to_sd = torch.autograd.grad(logits, (mean, sd), residuals * scale)
        value = (logits.detach() * indicators).sum(dtype=torch.float64) - normalizers.sum(dtype=torch.float64)
        return value * scale, to_mean, to_sd

    def _ivon(self, noise: Tensor, *batch: Tensor) -> Tensor:
        """Take one step of IVON, algorithm 1: w / N times the prior's precisions is the weight decay, N / w the sample size."""
        own, rate = self.optimizer.state[self.mean], self.optimizer.param_groups[0]["lr"]
        decay, step = self.scale * self.precisions, own["step"]
        curvature, beta = own["curvature"], self.plan.hessian_decay
        sd = (self.scale / (curvature + decay)).sqrt()
        value, gradient = self._log_likelihood(self.mean + sd * noise, *batch)
        gradient = -gradient / self.num_examples
        found = (gradient * noise).mean(dim=0) / sd
        own["momentum"].mul_(MOMENTUM).add_(gradient.mean(dim=0), alpha=1 - MOMENTUM)
        away = found - curvature
        correction = 0.5 * (1 - beta) ** 2 * away.square() / (curvature + decay)
        curvature.add_((1 - beta) * away).add_(correction)
        step += 1
        self.optimizer.state[self.log_sd]["step"] += 1
        unbiased = own["momentum"] / (1 - MOMENTUM**step)
        objective = value.mean() - self.plan.kl_weight * self._divergence(sd)
        self.mean.sub_(rate * (unbiased + decay * self._away()) / (curvature + decay))
        self.log_sd.copy_(0.5 * (self.scale / (curvature + decay)).log())
        return objective

    def _away(self) -> Tensor:
        """Return m minus the prior's mean, (P,)."""
        return self.mean if self.prior_mean is None else self.mean - self.prior_mean

    def _divergence(self, sd: Tensor) -> Tensor:
        """Return KL(q || prior), float64."""
        precise = self.precisions.double()
        spread = precise * (sd.double().square() + self._away().double().square())
        return 0.5 * (spread - 1 - precise.log()).sum() - sd.double().log().sum()

    def end_round(self, seen: Tensor) -> None:
        """Record the mean objective estimate of each epoch."""
        values, first = seen.mean(dim=1), self.num_epochs
        self.seen += values.tolist()
        bad = torch.isfinite(values).logical_not().nonzero()
        if len(bad):
            raise NumericError(
                f"the ELBO is not finite in epoch {first + int(bad[0]) + 1}",
                hint=f"use a \0learning_rate\0 below {self.plan.learning_rate:g}",
            )

    def state(self) -> dict[str, Tensor]:
        """Return the history."""
        return {"history.elbo": torch.tensor(self.seen, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the history."""
        self.seen = state["history.elbo"].tolist()
