"""Multiplicative normalizing flows: a random multiplier z for each input of a layer, and the model that infers it.

Louizos and Welling (2017), arXiv 1703.01961; with inclusions Skaaret-Lund (2022), section 4.3: w_ij given z is
gamma_ij N(z_i mu_ij, sigma_ij^2), z = f_K(... f_1(z_0)), z_0 Gaussian, and the divergence gains
log q(z) - log r(z | w), r the auxiliary model of equations (4.8), (4.12) and (4.13).

The coupling layers are those of equation (3.6) with its error mended: the shift is added to the coordinates that move and to
no others, so that log |det| = sum over them of log sigma, and the layer is invertible. Masks are drawn once and alternate, so that
q(z) is one density and not a mixture over masks.

Shifts are bounded, 10 tanh(mu / 10). A coordinate that moves goes to a point between itself and its shift, so that no z is
ever beyond the largest of z_0 and 10, whatever the networks have become; with log variances of r that are clipped to +-10, nothing
overflows. Unbounded, z and the shifts of the inverse flow drive each other up by orders of magnitude at learning rates of 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from bnncli.latent.factors import LEAST_VARIANCE, Moments
from bnncli.latent.products import product, small_network
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LOG_TURN = math.log(2 * math.pi)
_SLOPE = 0.1
_LARGEST_SHIFT = 10.0
_LARGEST_LOG_VAR = 10.0
_GATE_START = 2.0  # a new layer keeps nine tenths of what it gets


class Coupling(NamedTuple):
    """One layer z -> m z + (1 - m) (sigma z + (1 - sigma) mu), sigma and mu from a network of m z.

    Args:
        mask: (in,) of zeros and ones; ones condition, zeros move.
        weights: (R, out, in) of each linear layer of the network; the last gives mu and the gate, 2 in.
        biases: (R, out).
    """

    mask: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The layer at z (R, M, in), and its log |det| (R, M)."""
        kept = z * self.mask
        shift, gate = self._network(kept)
        moves = 1 - self.mask
        sigma = torch.sigmoid(gate)
        moved = torch.lerp(shift, z, sigma)
        return kept + moves * moved, (moves * torch.nn.functional.logsigmoid(gate)).sum(dim=2)

    def inverse(self, z: Tensor) -> Tensor:
        """What the layer takes to z (R, M, in)."""
        kept = z * self.mask
        shift, gate = self._network(kept)
        return kept + (1 - self.mask) * (shift + (z - shift) / torch.sigmoid(gate))

    def _network(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and gate (R, M, in)."""
        hidden = small_network(hidden, self.weights, self.biases, _SLOPE)
        shift, gate = hidden.chunk(2, dim=2)
        return _LARGEST_SHIFT * torch.tanh(shift / _LARGEST_SHIFT), gate + _GATE_START


class MultiplierModel(NamedTuple):
    """q(z) and r(z | w) of one layer's inputs.

    Args:
        start_mean, start_log_var: (R, in), of z_0.
        flow: from z_0 to z.
        readout: e, (R, in). location, log_scale: d_1 and d_2, (R, in).
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
        """z (R, M, in) of standard normal noise (R, M, in), and log q(z) (R, M); equation (3.3)."""
        z = torch.addcmul(self.start_mean.unsqueeze(1), (0.5 * self.start_log_var).exp().unsqueeze(1), noise)
        log_density = -0.5 * (noise.square() + self.start_log_var.unsqueeze(1) + _LOG_TURN).sum(dim=2)
        for layer in self.flow:
            z, log_det = layer(z)
            log_density = log_density - log_det
        return z, log_density

    def log_density(self, z: Tensor) -> Tensor:
        """log q(z) (R, M) of any z (R, M, in)."""
        for layer in reversed(self.flow):
            z = layer.inverse(z)
        noise = (z - self.start_mean.unsqueeze(1)) * (-0.5 * self.start_log_var).exp().unsqueeze(1)
        return self.draw(noise)[1]

    def log_auxiliary(self, z: Tensor, weight: Moments, noise: Tensor, gradient: Moments | None = None) -> Tensor:
        """log r(z | w) (R, M), w drawn through the activations e^T w, taken to be Gaussian.

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
        """log r(z | w) (R, M) of z (R, M, in), activations e^T w (R, M, out); equations (4.8), (4.12) and (4.13)."""
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
        """That of one repeat, R = 1; views."""
        return self.of_repeats(slice(repeat, repeat + 1))

    def of_repeats(self, rows: slice) -> MultiplierModel:
        """That of some repeats; views."""
        return self.from_tensors({name: part if name.endswith("mask") else part[rows] for name, part in self.tensors()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, masks included."""
        for name in ("start_mean", "start_log_var", "readout", "location", "log_scale"):
            yield name, getattr(self, name)
        for name in ("flow", "inverse_flow"):
            for index, layer in enumerate(getattr(self, name)):
                yield f"{name}.{index}.mask", layer.mask
                for part, (weight, bias) in enumerate(zip(layer.weights, layer.biases, strict=True)):
                    yield f"{name}.{index}.weight.{part}", weight
                    yield f"{name}.{index}.bias.{part}", bias

    def parameters(self) -> list[Tensor]:
        """What is learnt: all tensors but the masks."""
        return [tensor for name, tensor in self.tensors() if not name.endswith("mask")]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MultiplierModel:
        """The inverse of tensors()."""

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
    """Numbers that the model of one layer learns."""
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
    """A model that starts with z near 1, and flows near the identity."""

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
