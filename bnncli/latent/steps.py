"""One step of a latent binary fit: the log likelihood of a batch and the gradients of the bound.

The bound is the expected log likelihood less the divergence of q to the prior. The likelihood is differentiated by autograd
down to the moments of the weights and biases (or to drawn ones), the rest of the way is factor_gradients and bias_gradients:
on the weights and biases of all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bnncli.latent.activations import draw_activations
from bnncli.latent.divergence import Multiplier, bias_gradients, factor_gradients, multiplier_pull
from bnncli.latent.factors import LEAST_VARIANCE, Factors, Moments, Workspace, layer_moments, moments
from bnncli.latent.model import LatentModel
from bnncli.latent.products import product
from bnncli.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


class Minibatch(NamedTuple):
    """Examples of a step.

    Args:
        features: (n, D). labels: (n,) int64 or (n, C), those of each repeat before them, (R, n) or (R, n, C), where they differ.
        share: of the whole data, n / N: what weighs the divergence.
    """

    features: Tensor
    labels: Tensor
    share: float


class Step(NamedTuple):
    """What a step saw, detached.

    Args:
        log_likelihood: of the batch, (R,).
        flow: log q(z) - log r(z | w) by layer, (R, L); 0 without multipliers.
    """

    log_likelihood: Tensor
    flow: Tensor


class EstimatorSettings(NamedTuple):
    """What the estimators can be told.

    Args:
        estimator: lrt, mnf or concrete. variance: exact or published, of lrt and mnf.
        temperature: of the relaxed inclusions (concrete). Low ones are nearer to zeros and ones, but their gradient is zero in
            nearly all draws: at 0.001, the thesis's, in all but about one of a thousand.
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
    """Set the gradient of minus the bound's share on everything that the model learns.

    Args:
        workspace: `workspace_of` this model; with one the gradients of the weights' factors lie in it.
    """
    space = workspace or workspace_of(model)
    if settings.estimator == "concrete":
        return _differentiate_weights(model, batch, settings, generator, space)
    return _differentiate_moments(model, batch, settings, generator, space)


def workspace_of(model: LatentModel) -> Workspace:
    """What the steps on a model write to."""
    return Workspace.of(model.factors, model.layout, has_switching=bool(model.multipliers))


class Biases(NamedTuple):
    """Mean and variance of all biases, (R, B) each."""

    mean: Tensor
    variance: Tensor


class _Forward(NamedTuple):
    """Logits (R, n, K), and of every layer with a multiplier its draws z (R, M, in) and log q(z) - log r(z | w) (R, M)."""

    logits: Tensor
    draws: list[Tensor]
    flows: list[Tensor]


def draw_logits(
    model: LatentModel, features: Tensor, weight: Moments, generator: torch.Generator, *, multiplier_draws: int = 10
) -> Tensor:
    """Logits (R, n, K) of features (n, D), the activations of every layer drawn from their mean and variance."""
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
    biases = zip(*(layout.biases(part) for part in bias or bias_leaves(factors)), strict=True)
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
            # Example i has draw i modulo their number. Indexing would be the same; its gradient is slow, and on a GPU a sort.
            z = drawn if count == num_examples else drawn.repeat(1, -(-num_examples // count), 1)[:, :num_examples]
        hidden = draw_activations(
            hidden if index == 0 else hidden.relu(),
            own, bias_mean, bias_variance, normal(num_examples, outputs), z, gradient=to_layers[index],
        )  # fmt: skip
    return _Forward(hidden, draws, flows)


def leaves(model: LatentModel, variance: str, workspace: Workspace | None = None) -> Moments:
    """The moments of the weights, apart from the graph; without multipliers both variances as one."""
    return moments(model.factors, model.layout, variance=variance, is_merged=not model.multipliers, workspace=workspace)


@no_grad
def bias_leaves(factors: Factors) -> Biases:
    """The moments of the biases, apart from the graph."""
    return Biases(factors.bias_mean.detach(), factors.bias_sd.square_().add_(LEAST_VARIANCE))


def _differentiate_moments(
    model: LatentModel, batch: Minibatch, settings: EstimatorSettings, generator: torch.Generator, space: Workspace
) -> Step:
    factors = model.factors
    weight = leaves(model, settings.variance, space)
    own = space.gradient if weight.switching is not None else space.gradient._replace(switching=None)
    for part in own:
        if part is not None:
            part.zero_()
    bias = bias_leaves(factors)
    for part in bias:
        part.requires_grad_()
    forward = _forward(model, batch.features, weight, generator, settings.multiplier_draws, own, bias)
    fit = model.layout.likelihood.log_likelihoods(forward.logits, batch.labels).sum(dim=1)
    loss, multipliers = -fit.sum(), None
    if model.multipliers:
        divergence = torch.stack(forward.flows).mean(dim=2).sum()
        pulls = multiplier_pull(weight, factors, model.prior, model.layout, space)
        for z, (first, second) in zip(forward.draws, pulls, strict=True):
            # The weights' divergence as far as z goes: linear in its two moments.
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
        if gradient is None:  # it has been written already, by small_network
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
    """Weights drawn with relaxed inclusions, the same for all examples; Maddison et al. (2017), arXiv 1611.00712."""
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
    """Adds what comes through the drawn weights to the factors' gradients."""
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
    """Draws into memory that is there, float32 whatever the precision: the numbers do not depend on it."""
    if to.dtype == torch.float32 and to.device.type == generator.device.type:
        draw(to.shape, generator=generator, out=to)
    else:
        to.copy_(draw(to.shape, generator=generator, device=generator.device))


def _normal_like(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like)
