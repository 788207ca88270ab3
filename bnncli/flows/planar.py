"""Planar flow: a bend along one direction.

Rezende and Mohamed (2015), arXiv:1505.05770, equation 10 and appendix A.1; the inverse is the root of a monotone scalar
equation.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.flows import PUBLISHED, SPACES, Recipe, loaded, tensors_of, uniform
from bnncli.layout import HeadLayout

# Halving an interval of width 2 |w . u| this often leaves less than a float64 rounding error of it.
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

    def __init__(self, layout: HeadLayout, generator: torch.Generator) -> None:
        super().__init__()
        dim = layout.num_params
        bound = 1 / math.sqrt(dim)
        self.w = nn.Parameter(uniform((dim,), bound, generator))
        self.raw_u = nn.Parameter(uniform((dim,), bound, generator))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=generator.device))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The image of z (S, P) and log|det J| = log(1 + (1 - tanh^2) w . u), (S,)."""
        u, slope = self._constrained()
        bend = torch.tanh(z @ self.w + self.bias)
        return z + bend.unsqueeze(-1) * u, torch.log1p((1 - bend.square()) * slope)

    def inverse(self, y: Tensor) -> Tensor:
        """z (S, P) with F(z) = y: a = w . z solves a + w . u tanh(a + bias) = w . y, increasing in a."""
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
        """`w` (P,), `raw_u` (P,), `bias` (1,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: HeadLayout) -> Self:
        """The inverse of to_tensors."""
        return loaded(cls(layout, torch.Generator()), tensors)

    def summary(self) -> dict[str, float]:
        """w . u (slope at the bend; near 0 does nothing, near -1 folds), |u| and |w|."""
        with torch.no_grad():
            u, slope = self._constrained()
            return {"slope": float(slope), "u_norm": float(u.norm()), "w_norm": float(self.w.norm())}

    def _constrained(self) -> tuple[Tensor, Tensor]:
        """u (P,) and w . u, a scalar above -1."""
        product = self.w @ self.raw_u
        slope = softplus(product) - 1
        return self.raw_u + (slope - product) * self.w / self.w.square().sum(), slope
