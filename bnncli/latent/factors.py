"""Variational factors of a latent binary network's weights, their moments, and multiplicative normalizing flows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.lazy import no_grad, torch
from bnncli.parameters.layouts import NetworkLayout

if TYPE_CHECKING:
    from torch import Tensor


def product(inputs: Tensor, weight: Tensor, start: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Return start + inputs weight^T, (R, n, out).

    Args:
        inputs: (R, n, in).
        weight: (R, out, in).
        start: (R, 1 or n, out).
        gradient: (R, out, in); backward adds the gradient of the weight to it, provided that start or inputs require a
          gradient. Without it autograd computes the weight's gradient.
    """
    if gradient is None or not torch.is_grad_enabled():
        return torch.baddbmm(start, inputs, weight.transpose(1, 2))
    result: Tensor = _product_function().apply(inputs, start, weight, gradient)
    return result


@cache
def _product_function() -> Any:
    """Return the autograd function of `product`."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, start: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
            ctx.save_for_backward(inputs)
            ctx.weight, ctx.gradient, ctx.num_rows = weight, gradient, start.shape[1]
            return torch.baddbmm(start, inputs, weight.transpose(1, 2))

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            (gradient,) = gradients
            (inputs,) = ctx.saved_tensors
            ctx.gradient.baddbmm_(gradient.transpose(1, 2), inputs)
            to_inputs = torch.bmm(gradient, ctx.weight) if ctx.needs_input_grad[0] else None
            if not ctx.needs_input_grad[1]:
                return to_inputs, None, None, None
            is_shared = ctx.num_rows == 1 and gradient.shape[1] > 1
            return to_inputs, gradient.sum(dim=1, keepdim=True) if is_shared else gradient, None, None

    return Product


def small_network(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], slope: float) -> Tensor:
    """Return the outputs (R, n, out) of linear layers with leaky ReLU between them, as a single autograd node.

    Args:
        inputs: (R, n, in).
        weights: (R, out, in) of each layer.
        biases: (R, out) of each layer.
        slope: of the leaky ReLU below 0.

    A weight that has a `.grad` gets its gradient written there (not added) and none from autograd: a network is used
    once a step, and its memory is reused.
    """
    result: Tensor = _small_network_function().apply(inputs, slope, *weights, *biases)
    return result


@cache
def _small_network_function() -> Any:
    """Return the autograd function of `small_network`."""

    class SmallNetwork(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, slope: float, *parameters: Tensor) -> Tensor:
            count = len(parameters) // 2
            hidden, kept = inputs, [inputs]
            for weight, bias in zip(parameters[:count], parameters[count:], strict=True):
                if len(kept) > 1:
                    torch.nn.functional.leaky_relu(hidden, slope, inplace=True)
                hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2))
                kept.append(hidden)
            ctx.slope, ctx.count = slope, count
            ctx.memory = [weight.grad if weight.is_leaf else None for weight in parameters[:count]]
            ctx.save_for_backward(*kept[:-1], *parameters[:count])
            return hidden

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            (gradient,) = gradients
            hidden, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
            to_weights: list[Tensor | None] = []
            to_biases: list[Tensor] = []
            for index in reversed(range(ctx.count)):
                to_weights.insert(0, _weight_gradient(gradient, hidden[index], ctx.memory[index]))
                to_biases.insert(0, gradient.sum(dim=1))
                gradient = torch.bmm(gradient, weights[index])
                if index > 0:
                    # A leaky ReLU keeps the sign, so the sign of its output is that of its input.
                    gradient = torch.ops.aten.leaky_relu_backward(gradient, hidden[index], ctx.slope, True)
            return gradient, None, *to_weights, *to_biases

    return SmallNetwork


def _weight_gradient(gradient: Tensor, inputs: Tensor, memory: Tensor | None) -> Tensor | None:
    """Return the gradient of a linear layer's weight, or None when it was written to `memory`."""
    if memory is None:
        return torch.bmm(gradient.transpose(1, 2), inputs)
    torch.bmm(gradient.transpose(1, 2), inputs, out=memory)
    return None


LEAST_SD = 1e-30
LEAST_VARIANCE = 1e-20  # added, so that the derivative of the square root is finite where the variance is 0


@dataclass(frozen=True)
class Factors:
    """Parameters of q for every repeat and layer, weights and biases flattened.

    Args:
        mean: (R, W), slab means.
        rho: (R, W); the slab's standard deviation is softplus(rho).
        logit: (R, W), log odds of inclusion.
        bias_mean: (R, B).
        bias_rho: (R, B).
    """

    mean: Tensor
    rho: Tensor
    logit: Tensor
    bias_mean: Tensor
    bias_rho: Tensor

    @property
    def inclusion(self) -> Tensor:
        """Return alpha, (R, W)."""
        return torch.sigmoid(self.logit)

    @property
    def sd(self) -> Tensor:
        """Return sigma, (R, W)."""
        return torch.nn.functional.softplus(self.rho)

    @property
    def bias_sd(self) -> Tensor:
        """Return the standard deviations of the biases, (R, B)."""
        return torch.nn.functional.softplus(self.bias_rho)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    def to(self, device: torch.device | str) -> Factors:
        """Return a copy on another device."""
        return Factors(**{name: tensor.detach().to(device) for name, tensor in self.tensors().items()})


def inverse_softplus(sd: Tensor) -> Tensor:
    """Return the rho of a standard deviation (inverse softplus)."""
    return sd + torch.log(-torch.expm1(-sd))


def initial_factors(
    layout: NetworkLayout,
    num_repeats: int,
    generator: torch.Generator,
    *,
    mean_range: float = 0.2,
    logit_range: tuple[float, float] = (0.0, 1.0),
    device: torch.device | str = "cpu",
) -> Factors:
    """Draw starting values uniformly: means in +- mean_range, rho in (-5, -4), inclusion logits in logit_range."""

    def uniform(size: int, low: float, high: float) -> Tensor:
        drawn = torch.rand(num_repeats, size, generator=generator, device=generator.device)
        return (low + (high - low) * drawn).to(device)

    num_weights, num_biases = layout.num_weights, layout.num_biases
    return Factors(
        mean=uniform(num_weights, -mean_range, mean_range),
        rho=uniform(num_weights, -5, -4),
        logit=uniform(num_weights, *logit_range),
        bias_mean=uniform(num_biases, -mean_range, mean_range),
        bias_rho=uniform(num_biases, -5, -4),
    )


class Moments(NamedTuple):
    """Moments of the weights (R, W), given a multiplier z of each input (z = 1 without multipliers).

    The mean is z times `mean`, the variance `noise` + z^2 times `switching`.

    mean: alpha mu. noise: alpha sigma^2, of the slabs. switching: alpha (1 - alpha) mu^2, of the inclusions; None in
    the published form, whose noise is alpha^2 sigma^2.
    """

    mean: Tensor
    noise: Tensor
    switching: Tensor | None


@dataclass(frozen=True)
class Workspace:
    """Memory that every step reuses: allocating new pages would cost more than the arithmetic.

    Args:
        inclusion, exclusion, sd: alpha, 1 - alpha and sigma of the step, (R, W), which moments() keeps for the chain
            rule.
        moments, gradient: of the weights, and of the loss with respect to them.
        to_mean, to_rho, to_logit: gradients of the factors, (R, W).
        scratch: two blocks that fit a CPU's cache.
    """

    inclusion: Tensor
    exclusion: Tensor
    sd: Tensor
    moments: Moments
    gradient: Moments
    to_mean: Tensor
    to_rho: Tensor
    to_logit: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, factors: Factors, layout: NetworkLayout, *, has_switching: bool = True) -> Workspace:
        """Allocate a workspace for these factors.

        Args:
            has_switching: whether the moments keep the two variances apart.
        """

        def new() -> Tensor:
            return torch.empty_like(factors.mean, requires_grad=False)

        def new_moments() -> Moments:
            return Moments(new(), new(), new() if has_switching else None)

        scratch = factors.mean.new_empty(2, layout.block_size(factors.mean))
        return cls(new(), new(), new(), new_moments(), new_moments(), new(), new(), new(), scratch)

    def blocks_like(self, block: Tensor) -> tuple[Tensor, ...]:
        """Return the scratch blocks in the shape of a block (R, rows, in)."""
        return self.scratch[:, : block.numel()].view(-1, *block.shape).unbind(0)


@no_grad
def moments(
    factors: Factors,
    layout: NetworkLayout,
    *,
    variance: str = "exact",
    is_merged: bool = False,
    workspace: Workspace | None = None,
) -> Moments:
    """Compute the moments of every weight: exact, or `published`, Skaaret-Lund (2022), section 4.1, with Var = alpha^2 sigma^2.

    Args:
        is_merged: put the whole variance into `noise`, which is enough without multipliers.
        workspace: memory for the moments of all layers. Without one they are computed layer by layer: rounding at block
          ends may differ, and predictions must not change.
    """
    is_split = variance == "exact" and not is_merged
    space = workspace or Workspace.of(factors, layout, has_switching=is_split)
    result = space.moments if is_split else space.moments._replace(switching=None)
    flats = [factors.mean, factors.rho, factors.logit, space.inclusion, space.exclusion, space.sd]
    pieces = layout.blocks if workspace is None else layout.chunks
    for _, (mean, rho, logit, alpha, beta, sd, first, noise, *switching) in pieces(
        *flats, *(part for part in result if part is not None)
    ):
        torch.sigmoid(logit, out=alpha)
        torch.neg(logit, out=beta).sigmoid_()
        sd.copy_(torch.nn.functional.softplus(rho))
        torch.mul(alpha, mean, out=first)
        if variance == "published":
            torch.mul(alpha, sd, out=noise).square_()
            continue
        # alpha mu^2 - (alpha mu)^2 would cancel where alpha is near 1.
        torch.mul(sd, sd, out=noise).mul_(alpha)
        if is_split:
            torch.mul(beta, mean, out=switching[0]).mul_(first)
        else:
            noise.addcmul_(space.blocks_like(mean)[0].copy_(beta).mul_(mean), first)
    return result


def layer_moments(weight: Moments, layout: NetworkLayout) -> list[Moments]:
    """Return views of the moments of each layer's weights, (R, out, in)."""
    means, noises = layout.weights(weight.mean), layout.weights(weight.noise)
    if weight.switching is None:
        return [Moments(mean, noise, None) for mean, noise in zip(means, noises, strict=True)]
    return [Moments(*parts) for parts in zip(means, noises, layout.weights(weight.switching), strict=True)]


def log_sd(sd: Tensor) -> Tensor:
    """Return log sigma, clamped from below at log 1e-30."""
    return sd.clamp(min=LEAST_SD).log_()


_LOG_TURN = math.log(2 * math.pi)
_SLOPE = 0.1
_LARGEST_SHIFT = 10.0
_LARGEST_LOG_VAR = 10.0
_GATE_START = 2.0  # a new layer keeps nine tenths of its input


class Coupling(NamedTuple):
    """One layer z -> m z + (1 - m) (sigma z + (1 - sigma) mu), sigma and mu from a network of m z.

    Args:
        mask: (in,) of zeros and ones; ones condition, zeros move.
        weights: (R, out, in) of each linear layer of the network; the last one outputs mu and the gate, 2 in.
        biases: (R, out) of each layer.
    """

    mask: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer at z (R, M, in), and its log |det| (R, M)."""
        kept = z * self.mask
        shift, gate = self._network(kept)
        moves = 1 - self.mask
        sigma = torch.sigmoid(gate)
        moved = torch.lerp(shift, z, sigma)
        return kept + moves * moved, (moves * torch.nn.functional.logsigmoid(gate)).sum(dim=2)

    def inverse(self, z: Tensor) -> Tensor:
        """Return the preimage of z (R, M, in)."""
        kept = z * self.mask
        shift, gate = self._network(kept)
        return kept + (1 - self.mask) * (shift + (z - shift) / torch.sigmoid(gate))

    def _network(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and gate (R, M, in)."""
        hidden = small_network(hidden, self.weights, self.biases, _SLOPE)
        shift, gate = hidden.chunk(2, dim=2)
        return _LARGEST_SHIFT * torch.tanh(shift / _LARGEST_SHIFT), gate + _GATE_START


class MultiplierModel(NamedTuple):
    """q(z) and r(z | w) of one layer's inputs.

    Args:
        start_mean, start_log_var: (R, in), of z_0.
        flow: from z_0 to z.
        readout: e, (R, in).
        location, log_scale: d_1 and d_2, (R, in).
        inverse_flow: from z to z_b.
    """

    start_mean: Tensor
    start_log_var: Tensor
    flow: tuple[Coupling, ...]
    readout: Tensor
    location: Tensor
    log_scale: Tensor
    inverse_flow: tuple[Coupling, ...]

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (R, M, in) of standard normal noise (R, M, in), and log q(z) (R, M); equation (3.3)."""
        z = torch.addcmul(self.start_mean.unsqueeze(1), (0.5 * self.start_log_var).exp().unsqueeze(1), noise)
        log_density = -0.5 * (noise.square() + self.start_log_var.unsqueeze(1) + _LOG_TURN).sum(dim=2)
        for layer in self.flow:
            z, log_det = layer(z)
            log_density = log_density - log_det
        return z, log_density

    def log_density(self, z: Tensor) -> Tensor:
        """Return log q(z) (R, M) of any z (R, M, in)."""
        for layer in reversed(self.flow):
            z = layer.inverse(z)
        noise = (z - self.start_mean.unsqueeze(1)) * (-0.5 * self.start_log_var).exp().unsqueeze(1)
        return self.draw(noise)[1]

    def log_auxiliary(self, z: Tensor, weight: Moments, noise: Tensor, gradient: Moments | None = None) -> Tensor:
        """Return log r(z | w) (R, M), w drawn through the activations e^T w, which are taken to be Gaussian.

        Args:
            z: (R, M, in).
            weight: moments of the layer's weights, (R, out, in) each.
            noise: standard normal, (R, M, out).
            gradient: as in `product`, of each moment.
        """
        to_mean, to_noise, to_switching = gradient or (None, None, None)
        scaled = self.readout.unsqueeze(1) * z
        nothing = z.new_zeros(len(z), 1, noise.shape[2])
        mean = product(scaled, weight.mean, nothing, to_mean)
        variance = product(self.readout.square().unsqueeze(1), weight.noise, nothing, to_noise)
        if weight.switching is not None:
            variance = product(scaled.square(), weight.switching, variance, to_switching)
        return self.log_auxiliary_at(z, torch.addcmul(mean, (variance + LEAST_VARIANCE).sqrt(), noise))

    def log_auxiliary_at(self, z: Tensor, activations: Tensor) -> Tensor:
        """Return log r(z | w) (R, M) for z (R, M, in), activations e^T w (R, M, out); equations (4.8), (4.12) and (4.13)."""
        # (d (x) tanh(b)) averaged over the outputs is d times the mean of tanh(b).
        level = torch.tanh(activations).mean(dim=2, keepdim=True)
        location = self.location.unsqueeze(1) * level
        log_var = (self.log_scale.unsqueeze(1) * level).clamp(-_LARGEST_LOG_VAR, _LARGEST_LOG_VAR)
        total = z.new_zeros(z.shape[:2])
        for layer in self.inverse_flow:
            z, log_det = layer(z)
            total = total + log_det
        return total - 0.5 * ((z - location).square() * (-log_var).exp() + log_var + _LOG_TURN).sum(dim=2)

    def at(self, repeat: int) -> MultiplierModel:
        """Return views of one repeat, R = 1."""
        return self.of_repeats(slice(repeat, repeat + 1))

    def of_repeats(self, rows: slice) -> MultiplierModel:
        """Return views of some repeats."""
        return self.from_tensors({name: part if name.endswith("mask") else part[rows] for name, part in self.tensors()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, masks included."""
        for name in ("start_mean", "start_log_var", "readout", "location", "log_scale"):
            yield name, getattr(self, name)
        for name in ("flow", "inverse_flow"):
            for index, layer in enumerate(getattr(self, name)):
                yield f"{name}.{index}.mask", layer.mask
                for part, (weight, bias) in enumerate(zip(layer.weights, layer.biases, strict=True)):
                    yield f"{name}.{index}.weight.{part}", weight
                    yield f"{name}.{index}.bias.{part}", bias

    def parameters(self) -> list[Tensor]:
        """Return the learnt tensors: all but the masks."""
        return [tensor for name, tensor in self.tensors() if not name.endswith("mask")]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MultiplierModel:
        """Invert tensors()."""

        def couplings(name: str) -> tuple[Coupling, ...]:
            layers: list[Coupling] = []
            while f"{name}.{len(layers)}.mask" in tensors:
                prefix = f"{name}.{len(layers)}."
                count = sum(key.startswith(f"{prefix}weight.") for key in tensors)
                parts = [tuple(tensors[f"{prefix}{kind}.{i}"] for i in range(count)) for kind in ("weight", "bias")]
                layers.append(Coupling(tensors[f"{prefix}mask"], *parts))
            return tuple(layers)

        plain = {name: tensors[name] for name in ("start_mean", "start_log_var", "readout", "location", "log_scale")}
        return cls(flow=couplings("flow"), inverse_flow=couplings("inverse_flow"), **plain)


def num_params(num_inputs: int, *, length: int = 2, hidden: tuple[int, ...] = (75, 75, 75, 75)) -> int:
    """Return how many numbers the model of one layer learns."""
    sizes = (num_inputs, *hidden, 2 * num_inputs)
    coupling = sum(after * (before + 1) for before, after in pairwise(sizes))
    return 5 * num_inputs + 2 * length * coupling


def initial_model(
    num_inputs: int,
    num_repeats: int,
    generator: torch.Generator,
    *,
    length: int = 2,
    hidden: tuple[int, ...] = (75, 75, 75, 75),
    device: torch.device | str = "cpu",
) -> MultiplierModel:
    """Return a model that starts with z near 1 and flows near the identity."""

    def normal(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, device=generator.device)).to(device)

    def couplings() -> tuple[Coupling, ...]:
        mask = torch.zeros(num_inputs, device=generator.device)
        mask[torch.randperm(num_inputs, generator=generator, device=generator.device)[: num_inputs // 2]] = 1
        mask = mask.to(device)
        sizes = (num_inputs, *hidden, 2 * num_inputs)
        layers = []
        for index in range(length):
            weights = [normal(num_repeats, after, before, scale=before**-0.5) for before, after in pairwise(sizes)]
            weights[-1] *= 0.1
            biases = [weight.new_zeros(num_repeats, weight.shape[1]) for weight in weights]
            layers.append(Coupling(mask if index % 2 == 0 else 1 - mask, tuple(weights), tuple(biases)))
        return tuple(layers)

    shape = (num_repeats, num_inputs)
    return MultiplierModel(
        start_mean=1 + normal(*shape, scale=0.1),
        start_log_var=-9 + normal(*shape, scale=0.1),
        flow=couplings(),
        readout=normal(*shape, scale=0.1),
        location=normal(*shape, scale=0.1),
        log_scale=normal(*shape, scale=0.1),
        inverse_flow=couplings(),
    )
