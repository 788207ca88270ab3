"""Small tanh networks over all of whose weights there is a posterior: any likelihood, the exact Hessian, HMC.

What the commands take are classifiers; here the likelihood is a function of the outputs, so that regression has a posterior as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bnncli.covariances.full import inverse
from bnncli.errors import NumericError
from bnncli.inference.hmc import sample_hmc
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamPart, consecutive, parts_to_json
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**23  # numbers of a layer that are held at once
_MOST_NEWTON_STEPS = 100
_TOLERANCE = 1e-6  # posterior standard deviations, all parameters together


@dataclass(frozen=True)
class TanhLayout:
    """Weights and biases of linear layers with tanh between them, in order.

    Args:
        widths: of the inputs, of every hidden layer, of the outputs.
    """

    widths: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[ParamPart, ...]:
        """A weight (out, in) and a bias (out,) of each layer."""
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for layer, (before, after) in enumerate(pairwise(self.widths)):
            found += [(f"{layer}.weight", (after, before), False), (f"{layer}.bias", (after,), True)]
        return consecutive(found)

    @property
    def num_params(self) -> int:
        """P."""
        return self.parts[-1].place.stop

    def to_json(self) -> list[dict[str, object]]:
        """Name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """The widths."""
        return {"widths": list(self.widths)}

    def outputs(self, inputs: Tensor, theta: Tensor) -> Tensor:
        """Outputs (S, N, K) of inputs (N, D) under theta (S, P)."""
        return self.layers(inputs, theta)[-1]

    def layers(self, inputs: Tensor, theta: Tensor) -> list[Tensor]:
        """What each linear layer takes, (S, N, D) each, and the outputs (S, N, K)."""
        found = [inputs.expand(len(theta), *inputs.shape)]
        for weight, bias in zip(self.parts[::2], self.parts[1::2], strict=True):
            if len(found) > 1:
                found[-1] = found[-1].tanh()
            matrix = theta[:, weight.place].unflatten(1, weight.shape)
            found.append(torch.baddbmm(theta[:, bias.place].unsqueeze(1), found[-1], matrix.mT))
        return found

    def pull_back(self, layers: Sequence[Tensor], theta: Tensor, slope: Tensor) -> Tensor:
        """The gradient by theta (S, P) of what has this slope (S, N, K) by the outputs."""
        found = torch.empty_like(theta)
        for place in reversed(range(0, len(self.parts), 2)):
            (weight, bias), taken = self.parts[place : place + 2], layers[place // 2]
            found[:, bias.place] = slope.sum(dim=1)
            found[:, weight.place] = (slope.mT @ taken).flatten(1)
            if place:
                matrix = theta[:, weight.place].unflatten(1, weight.shape)
                slope = (slope @ matrix) * (1 - taken.square())
        return found

    def output_blocks(self, inputs: Tensor, theta: Tensor) -> Iterator[Tensor]:
        """The same (s, N, K), some draws at a time."""
        for block in theta.split(max(1, _AT_ONCE // (len(inputs) * max(self.widths)))):
            yield self.outputs(inputs, block)


@dataclass(frozen=True)
class ToyTarget:
    """The log posterior of a network's weights, all data at once, as samplers see it.

    Args:
        inputs: (N, D) float64.
        layout: of theta.
        prior: of theta.
        log_likelihood: of all examples, (S,), given outputs (S, N, K).
    """

    inputs: Tensor
    layout: TanhLayout
    prior: Prior
    log_likelihood: Callable[[Tensor], Tensor]
    is_resident = True
    is_capturable = False

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        """That of the inputs."""
        return self.inputs.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the inputs."""
        return self.inputs.dtype

    def log_joint(self, theta: Tensor) -> Tensor:
        """Log likelihood plus log prior, (S,) nats, for theta (S, P)."""
        theta = theta.to(self.inputs)
        return self.log_likelihood(self.layout.outputs(self.inputs, theta)) + self.prior.log_density(theta, self.layout)

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The same with its gradient (S, P), by hand but for the likelihood's: networks this small are all overhead."""
        theta = theta.detach().to(self.inputs)
        *taken, outputs = self.layout.layers(self.inputs, theta)
        with torch.enable_grad():
            free = outputs.detach().requires_grad_()
            value = self.log_likelihood(free)
            (slope,) = torch.autograd.grad(value.sum(), free)
        gradient = self.layout.pull_back(taken, theta, slope) + self.prior.gradient(theta, self.layout)
        return value.detach() + self.prior.log_density(theta, self.layout), gradient

    def precision(self, theta: Tensor) -> Tensor:
        """Minus the Hessian of the log joint at theta (P,), exact, (P, P)."""
        hessian: Tensor = torch.autograd.functional.hessian(
            lambda one: -self.log_joint(one.unsqueeze(0))[0], theta, vectorize=True
        )
        return (hessian + hessian.T) / 2


def fit_laplace(target: ToyTarget, generator: torch.Generator) -> Gaussian[TanhLayout]:
    """The Gaussian at a mode, from random weights, with the inverse of the exact Hessian there.

    Raises:
        NumericError: no mode was reached.
    """
    layout = target.layout
    theta = torch.zeros(layout.num_params, dtype=torch.float64)
    for part in layout.parts:
        if not part.is_bias:
            scale = 1 / math.sqrt(part.shape[1])
            theta[part.place] = scale * torch.randn(math.prod(part.shape), generator=generator, dtype=torch.float64)
    theta.requires_grad_()
    climber = torch.optim.LBFGS([theta], max_iter=3000, history_size=50, tolerance_grad=1e-9, tolerance_change=0.0,
                                line_search_fn="strong_wolfe")  # fmt: skip

    def loss() -> Tensor:
        climber.zero_grad()
        value = -target.log_joint(theta.unsqueeze(0))[0]
        value.backward()
        return value

    climber.step(loss)
    mode = theta.detach()
    for _ in range(_MOST_NEWTON_STEPS):
        gradient = target.log_joint_and_grad(mode.unsqueeze(0))[1][0]
        covariance = inverse(target.precision(mode))
        white = covariance.pull_back(gradient.unsqueeze(0))
        if covariance.jitter == 0 and float(white.norm()) < _TOLERANCE:
            return Gaussian(mode, covariance, layout, target.prior)
        mode = mode + covariance.unwhiten(white)[0]
    raise NumericError(f"no mode after {_MOST_NEWTON_STEPS} Newton steps", hint="use a larger \0prior_precision\0")


def linearised(gaussian: Gaussian[TanhLayout], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (N, K) and covariance (N, K, K) of the outputs of the network that is linearised at the Gaussian's mean."""
    layout = gaussian.layout
    jacobian: Tensor = torch.func.jacrev(lambda theta: layout.outputs(inputs, theta.unsqueeze(0))[0])(gaussian.mean)
    white = gaussian.covariance.pull_back(jacobian.flatten(0, 1)).unflatten(0, jacobian.shape[:2])
    return layout.outputs(inputs, gaussian.mean.unsqueeze(0))[0], white @ white.mT


def draw_chains(
    target: ToyTarget, gaussian: Gaussian[TanhLayout], generator: torch.Generator, *, num_chains: int, num_draws: int
) -> Tensor:
    """HMC's draws (C, T, P) float64, from around the Gaussian."""
    run = sample_hmc(
        target, mode=gaussian.mean, covariance=gaussian.covariance, generator=generator,
        num_chains=num_chains, num_warmup=num_draws // 2, num_draws=num_draws,
    )  # fmt: skip
    return run.draws.double()
