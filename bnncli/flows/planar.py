"""Planar flow: a bend along one direction.

Rezende and Mohamed (2015), arXiv:1505.05770, equation 10 and appendix A.1; the inverse is the root of a monotone scalar
equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.flows import PUBLISHED, SPACES, Recipe, load_tensors, tensors_of, uniform
from bnncli.parameters.layouts import ParamLayout

# Bisecting an interval of width 2 |w . u| this often leaves less than a float64 rounding error of it.
_BISECTIONS = 60


class Planar(nn.Module):
    """F(z) = z + u tanh(w . z + bias), u = raw_u + (softplus(w . raw_u) - 1 - w . raw_u) w / |w|^2.

    w . u > -1 for any parameters, so that F is invertible. Starts with w and raw_u from U(-1/sqrt(P), 1/sqrt(P)) and
    bias 0, as in Pyro.

    Args:
        layout: of theta; only P matters.
        generator: of the initial parameters.
    """

    recipe: ClassVar[Recipe] = PUBLISHED
    settings: ClassVar[tuple[str, ...]] = ()
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = "u = raw_u + (softplus(w . raw_u) - 1 - w . raw_u) w / |w|^2"

    def __init__(self, layout: ParamLayout, generator: torch.Generator) -> None:
        super().__init__()
        dim = layout.num_params
        bound = 1 / math.sqrt(dim)
        self.w = nn.Parameter(uniform((dim,), bound, generator))
        self.raw_u = nn.Parameter(uniform((dim,), bound, generator))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=generator.device))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = log(1 + (1 - tanh^2) w . u), (S,)."""
        u, slope = self._constrained()
        bend = torch.tanh(z @ self.w + self.bias)
        return z + bend.unsqueeze(-1) * u, torch.log1p((1 - bend.square()) * slope)

    @staticmethod
    def push_together(layers: Sequence[Planar], z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) through all layers and the sum of their log|det J| (S,), differentiable once.

        Equals layer by layer up to rounding, in a third of the operations: what all layers share is computed for all at
        once, and backward is in closed form.
        """
        parts = [getattr(layer, name) for name in ("w", "raw_u", "bias") for layer in layers]
        image, log_det = _Together.apply(z, *parts)
        return image, log_det

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: a = w . z solves a + w . u tanh(a + bias) = w . y, increasing in a."""
        u, slope = self._constrained()
        goal = y @ self.w
        low, high = goal - slope.abs(), goal + slope.abs()
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            is_above = middle + slope * torch.tanh(middle + self.bias) > goal
            high = torch.where(is_above, middle, high)
            low = torch.where(is_above, low, middle)
        bend = torch.tanh(0.5 * (low + high) + self.bias)
        return y - bend.unsqueeze(-1) * u

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `w` (P,), `raw_u` (P,), `bias` (1,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator()), tensors)

    def summary(self) -> dict[str, float]:
        """Return w . u (slope at the bend; near 0 does nothing, near -1 folds), |u| and |w|."""
        with torch.no_grad():
            u, slope = self._constrained()
            return {"slope": float(slope), "u_norm": float(u.norm()), "w_norm": float(self.w.norm())}

    def _constrained(self) -> tuple[Tensor, Tensor]:
        """Return u (P,) and w . u, a scalar above -1."""
        return _constrain(self.w, self.raw_u, self.w @ self.raw_u, self.w.square().sum())


def _constrain(w: Tensor, raw_u: Tensor, product: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and w . u, given w (..., P), raw_u (..., P), w . raw_u and |w|^2, the last two with as many axes or none."""
    slope = softplus(product) - 1
    return raw_u + (slope - product) * w / square, slope


class _Together(torch.autograd.Function):
    """Map z (S, P) and each layer's w (P,), raw_u (P,) and bias (1,) to the last image and the sum of the log dets (S,)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        count = len(parameters) // 3
        w, raw_u = torch.stack(parameters[:count]), torch.stack(parameters[count : 2 * count])
        product, square = (w * raw_u).sum(dim=1, keepdim=True), w.square().sum(dim=1, keepdim=True)
        u, slope = _constrain(w, raw_u, product, square)
        inputs, bends = [], []
        for own_w, own_u, bias in zip(w.unbind(), u.unbind(), parameters[2 * count :], strict=True):
            inputs.append(z)
            bends.append(torch.addmv(bias, z, own_w).tanh_().unsqueeze(1))
            z = torch.addcmul(z, bends[-1], own_u)
        bend, slope = torch.cat(bends, dim=1), slope.squeeze(1)
        rise = (1 - bend.square()) * slope
        ctx.save_for_backward(w, raw_u, u, product, square, bend, slope, rise, *inputs)
        return z, torch.log1p(rise).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Backpropagate layer by layer: a bend t has the derivative 1 - t^2, its log det -2 t w.u / (1 + (1 - t^2) w.u)."""
        assert not torch.is_grad_enabled(), "differentiable once: for second derivatives push through layer by layer"
        w, raw_u, u, product, square, bend, slope, rise, *inputs = ctx.saved_tensors
        to_image, weighted = gradients[0], gradients[1].unsqueeze(1) / (1 + rise)
        steepness = 1 - bend.square()
        known = weighted * rise * bend * -2
        layers = zip(inputs, w, u, bend.unbind(1), steepness.unbind(1), known.unbind(1), strict=True)
        to_u, to_w, to_bias = [], [], []
        for place, (z, own_w, own_u, own_bend, steep, own) in reversed(list(enumerate(layers))):
            inside = torch.addcmul(own, steep, torch.mv(to_image, own_u))
            to_u.append(torch.mv(to_image.T, own_bend))
            to_w.append(torch.mv(z.T, inside))
            to_bias.append(inside)
            if place or ctx.needs_input_grad[0]:
                to_image = torch.addr(to_image, inside, own_w)
        to_u_all, to_w_all = torch.stack(to_u[::-1]), torch.stack(to_w[::-1])
        # u = raw_u + (w.u - w.raw_u) w / |w|^2, where w.u = softplus(w.raw_u) - 1.
        along = (to_u_all * w).sum(dim=1, keepdim=True) / square
        share = (slope.unsqueeze(1) - product) / square
        to_product = ((weighted * steepness).sum(dim=0).unsqueeze(1) + along) * torch.sigmoid(product) - along
        to_raw_u = torch.addcmul(to_u_all, to_product, w)
        to_w_all = to_w_all + share * to_u_all + to_product * raw_u - (2 * share * along) * w
        to_biases = torch.stack(to_bias[::-1]).sum(dim=1).split(1)
        return to_image if ctx.needs_input_grad[0] else None, *to_w_all.unbind(), *to_raw_u.unbind(), *to_biases
