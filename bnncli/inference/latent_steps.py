"""One step of a latent binary fit: the log likelihood of a batch and the gradients of the bound.

The bound is the expected log likelihood less the divergence of q to the prior. The likelihood is differentiated by autograd
down to the moments of the weights (or to drawn weights), the rest of the way is factor_gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from bnncli.latent.activations import draw_activations
from bnncli.latent.divergence import Multiplier, bias_divergence, factor_gradients, multiplier_pull
from bnncli.latent.factors import Moments, layer_moments, moments
from bnncli.latent.layout import apply_layers
from bnncli.latent.model import LatentModel


class Batch(NamedTuple):
    """Examples of a step.

    Args:
        features: (n, D). labels: (n,) int64.
        share: of the whole data, n / N: what weighs the divergence.
    """

    features: Tensor
    labels: Tensor
    share: float


class Step(NamedTuple):
    """What a step saw: log likelihood of the batch (R,), and log q(z) - log r(z | w) by layer (R, L); both detached."""

    log_likelihood: Tensor
    flow: Tensor


class Settings(NamedTuple):
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


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Log likelihood (R,) of labels (n,) given logits (R, n, K); K = 1 is the logit of label 1."""
    num_repeats, _, num_outputs = logits.shape
    if num_outputs == 1:
        signs = (2 * labels - 1).to(logits.dtype)
        return -softplus(-logits[..., 0] * signs).sum(dim=1)
    target = labels.expand(num_repeats, -1)
    losses = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return -losses.view(num_repeats, -1).sum(dim=1)


def differentiate(model: LatentModel, batch: Batch, settings: Settings, generator: torch.Generator) -> Step:
    """Set the gradient of minus the bound's share on everything that the model learns."""
    if settings.estimator == "concrete":
        return _differentiate_weights(model, batch, settings, generator)
    return _differentiate_moments(model, batch, settings, generator)


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
    model: LatentModel, features: Tensor, weight: Moments, generator: torch.Generator, num_draws: int
) -> _Forward:
    layout, factors, num_examples = model.layout, model.factors, len(features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(model.num_repeats, *shape, generator=generator, device=generator.device).to(features)

    layers = layer_moments(weight, layout)
    biases = zip(layout.biases(factors.bias_mean), layout.biases(factors.bias_sd), strict=True)
    hidden = features.expand(model.num_repeats, -1, -1)
    draws, flows = [], []
    for index, (own, (bias_mean, bias_sd)) in enumerate(zip(layers, biases, strict=True)):
        outputs, inputs = layout.shapes[index]
        z = None
        if model.multipliers:
            multiplier = model.multipliers[index]
            count = min(num_draws, num_examples)
            drawn, log_density = multiplier.draw(normal(count, inputs))
            flows.append(log_density - multiplier.log_auxiliary(drawn, own, normal(count, outputs)))
            draws.append(drawn)
            z = drawn if count == num_examples else drawn[:, torch.arange(num_examples, device=features.device) % count]
        hidden = draw_activations(
            hidden if index == 0 else hidden.relu(), own, bias_mean, bias_sd, normal(num_examples, outputs), z
        )
    return _Forward(hidden, draws, flows)


def leaves(model: LatentModel, variance: str) -> Moments:
    """The moments of the weights, apart from the graph; without multipliers both variances as one."""
    found = moments(model.factors, model.layout, variance=variance)
    if found.switching is None or model.multipliers:
        return found
    return Moments(found.mean, found.noise.add_(found.switching), None)


def _differentiate_moments(model: LatentModel, batch: Batch, settings: Settings, generator: torch.Generator) -> Step:
    factors = model.factors
    found = leaves(model, settings.variance)
    for part in found:
        if part is not None:
            part.requires_grad_()
    weight = found
    forward = _forward(model, batch.features, weight, generator, settings.multiplier_draws)
    fit = log_likelihood(forward.logits, batch.labels)
    divergence = bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, model.layout).sum()
    multipliers = None
    if model.multipliers:
        divergence = divergence + sum(flow.mean(dim=1).sum() for flow in forward.flows)
        pulls = multiplier_pull(factors, model.prior, model.layout)
        for z, (first, second) in zip(forward.draws, pulls, strict=True):
            # The weights' divergence as far as z goes: linear in its two moments.
            divergence = divergence + (z.mean(dim=1) * first + z.square().mean(dim=1) * second).sum()
        multipliers = [Multiplier(z.detach().mean(dim=1), z.detach().square().mean(dim=1)) for z in forward.draws]
    leaf = [part for part in weight if part is not None]
    rest = [factors.bias_mean, factors.bias_rho, *model.multiplier_parameters()]
    loss = divergence * batch.share - fit.sum()
    gradients = torch.autograd.grad(loss, [*leaf, *rest])
    own = Moments(*gradients[: len(leaf)], *[None] * (3 - len(leaf)))
    if weight.switching is None and settings.variance == "exact":
        own = own._replace(switching=own.noise)  # one sum of two variances: the same derivative
    factors.mean.grad, factors.rho.grad, factors.logit.grad = factor_gradients(
        factors, own, model.prior, model.layout,
        scale=batch.share, variance=settings.variance, multipliers=multipliers,
    )  # fmt: skip
    for tensor, gradient in zip(rest, gradients[len(leaf) :], strict=True):
        tensor.grad = gradient
    flows = [flow.detach().mean(dim=1) for flow in forward.flows]
    return Step(fit.detach(), torch.stack(flows, dim=1) if flows else fit.new_zeros(model.num_repeats, 0))


def _differentiate_weights(model: LatentModel, batch: Batch, settings: Settings, generator: torch.Generator) -> Step:
    """Weights drawn with relaxed inclusions, the same for all examples; Maddison et al. (2017), arXiv 1611.00712."""
    factors, layout = model.factors, model.layout

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=generator.device).to(like)

    with torch.no_grad():
        uniform = torch.rand(factors.mean.shape, generator=generator, device=generator.device).to(factors.mean)
        logistic = torch.logit(uniform.clamp_(min=1e-7, max=1 - 1e-7))
        relaxed = torch.sigmoid((factors.logit - logistic) / settings.temperature)
        noise, sd = normal(factors.mean), factors.sd
        slab = torch.addcmul(factors.mean, sd, noise)
        weight = relaxed * slab
    weight.requires_grad_()
    bias = torch.addcmul(factors.bias_mean, factors.bias_sd, normal(factors.bias_mean))
    logits = apply_layers(batch.features, list(zip(layout.weights(weight), layout.biases(bias), strict=True)))
    fit = log_likelihood(logits, batch.labels)
    divergence = bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, layout).sum()
    loss = divergence * batch.share - fit.sum()
    d_weight, factors.bias_mean.grad, factors.bias_rho.grad = torch.autograd.grad(
        loss, [weight, factors.bias_mean, factors.bias_rho]
    )
    with torch.no_grad():
        nothing = torch.zeros_like(d_weight)
        d_mean, d_rho, d_logit = factor_gradients(
            factors, Moments(nothing, nothing, None), model.prior, layout, scale=batch.share
        )
        through = d_weight * relaxed
        factors.mean.grad = d_mean.add_(through)
        factors.rho.grad = d_rho.add_(through * noise * torch.sigmoid(factors.rho))
        slope = relaxed * (1 - relaxed) / settings.temperature
        factors.logit.grad = d_logit.add_(d_weight * slab * slope)
    return Step(fit.detach(), fit.new_zeros(model.num_repeats, 0))
