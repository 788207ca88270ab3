"""Refinement: a Gaussian posterior pushed through a normalising flow that maximises the ELBO.

Kristiadi, Eschenhagen, Hennig (2022), arXiv:2205.10041: minibatches, one draw a step, Adam with a cosine schedule. The
base stays as it is; only the layers learn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnncli.devices import single_threaded
from bnncli.errors import NumericError
from bnncli.flows import FlowLayer, build_layers, choose_space
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget, ValueWithGradient, batch_log_likelihood_and_grad
from bnncli.targets.likelihood import label_indicators

# Multiplications a step, below which one thread was as fast as two, and far faster beside other programs.
_SMALL_STEP = 2**21


@dataclass(frozen=True)
class RefineFit:
    """A refined posterior.

    Args:
        posterior: the flow.
        history: (E,), the mean over each epoch of the minibatch estimates of the ELBO, nats.
        seconds: wall-clock time of the fit.
    """

    posterior: Flow
    history: Tensor
    seconds: float


@dataclass(frozen=True)
class _Problem:
    """What a training step needs, in single precision and on the target's device."""

    target: LastLayerTarget
    mean: Tensor
    base: Gaussian
    space: str

    def elbo_estimate(
        self, layers: tuple[FlowLayer, ...], noise: Tensor, features: Tensor, indicators: Tensor
    ) -> Tensor:
        """Each draw's estimate of the ELBO less the base's entropy, (S,), from one minibatch."""
        scale = self.target.likelihood_scale * self.target.num_examples / features.shape[0]
        layout, prior_precision = self.target.layout, self.target.prior_precision

        def log_joint_and_grad(theta: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = batch_log_likelihood_and_grad(features, indicators, theta, layout)
            square = theta.square().sum(dim=1)
            joint = torch.add(-0.5 * prior_precision * square, value, alpha=scale)
            return joint, torch.add(-prior_precision * theta, gradient, alpha=scale)

        unwhiten = self.base.covariance.unwhiten
        x = noise if self.space == "whitened" else self.mean + unwhiten(noise)
        total = noise.new_zeros(noise.shape[0])
        for layer in layers:
            x, log_det = layer(x)
            total = total + log_det
        theta = self.mean + unwhiten(x) if self.space == "whitened" else x
        return ValueWithGradient.apply(theta, log_joint_and_grad) + total


def fit_flow(
    target: LastLayerTarget,
    base: Gaussian,
    *,
    generator: torch.Generator,
    flow: str = "radial",
    length: int = 5,
    epochs: int = 20,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    space: str = "auto",
    num_draws: int = 1,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
) -> RefineFit:
    """The flow of `length` layers on base that maximises the ELBO of target.

    Args:
        target: the log posterior, with all data.
        base: the Gaussian to start from.
        generator: of the initial layers, the shuffles and the draws.
        flow: kind of layer.
        length: layers; the published runs use 1 to 30.
        epochs: passes over the data, 20 as published.
        batch_size: examples a step, 128 as published.
        learning_rate: of Adam, falling to 0 as a cosine; 1e-3 as published.
        space: where the layers act: whitened, theta = m + L F(z), or weight, theta = F(m + L z), as published; auto is
            the kind's own choice.
        num_draws: theta drawn a step, 1 as published.
        settings: of the layers: rank, hidden, scale; those left out or None are the kind's own.
        progress: advanced once a step.

    Raises:
        NumericError: when the ELBO of an epoch is not finite.
        UsageError: when there is no such flow, or it does not take a setting or the space.
    """
    started = time.perf_counter()
    space = choose_space(flow, space)
    layers = build_layers(flow, target.layout, generator, length=length, **(settings or {}))
    dtype = target.dtype
    layers = tuple(layer.to(device=target.device, dtype=dtype) for layer in layers)
    covariance = base.covariance.to(device=target.device, dtype=dtype)
    single = Gaussian(base.mean.to(target.device), covariance, base.layout, base.prior_precision)
    problem = _Problem(target, single.mean.to(dtype), single, space)
    num_multiplications = batch_size * target.layout.num_params * num_draws
    with single_threaded() if num_multiplications < _SMALL_STEP else nullcontext():
        history = _train(
            problem,
            layers,
            generator=generator,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            num_draws=num_draws,
            progress=progress,
        )
    constant = base.entropy + 0.5 * base.layout.num_params * math.log(target.prior_precision / (2 * math.pi))
    layers = tuple(layer.to(dtype=torch.float64) for layer in layers)
    for layer in layers:
        layer.requires_grad_(False)
    posterior = Flow(base.to(target.device), layers, flow, space)
    return RefineFit(posterior, history + constant, time.perf_counter() - started)


def _train(
    problem: _Problem,
    layers: tuple[Any, ...],
    *,
    generator: torch.Generator,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    num_draws: int,
    progress: Progress,
) -> Tensor:
    """Trains layers in place; the ELBO, less constants, averaged over the steps of each epoch, (E,) float64."""
    target = problem.target
    indicators = label_indicators(target.labels, target.layout, target.dtype)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    num_batches = -(-target.num_examples // batch_size)
    task = progress.task("refine", epochs * num_batches)
    history = []
    for epoch in range(epochs):
        order = torch.randperm(target.num_examples, generator=generator, device=generator.device)
        order = order.to(target.device)
        features, shuffled = target.rows(order), indicators[:, order]
        total = torch.zeros((), dtype=torch.float64, device=target.device)
        for step in range(num_batches):
            rows = slice(step * batch_size, (step + 1) * batch_size)
            done = (epoch * num_batches + step) / (epochs * num_batches)
            optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * done))
            noise = _noise(problem, num_draws, generator)
            estimate = problem.elbo_estimate(layers, noise, features[rows], shuffled[:, rows]).mean()
            optimizer.zero_grad()
            estimate.neg().backward()
            optimizer.step()
            total += estimate.detach()
            task.advance()
        history.append(total / num_batches)
        if not torch.isfinite(total):
            raise NumericError(
                f"the ELBO is not finite in epoch {epoch + 1}", hint=f"use a --learning-rate below {learning_rate:g}"
            )
    return torch.stack(history)


def _noise(problem: _Problem, count: int, generator: torch.Generator) -> Tensor:
    """Standard normal (count, P) in the precision of the steps."""
    target = problem.target
    shape = (count, target.layout.num_params)
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=target.dtype)
    return noise.to(target.device)
