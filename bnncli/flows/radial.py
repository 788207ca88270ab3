"""Radial flow: contraction or expansion around a point.

Rezende and Mohamed (2015), arXiv:1505.05770, equation 14 and appendix A.2; the inverse is the positive root of a
quadratic, because the layer only moves points along the ray from x0.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.flows import PUBLISHED, SPACES, Recipe, loaded, tensors_of, uniform
from bnncli.layout import HeadLayout


class Radial(nn.Module):
    """F(z) = z + beta (z - x0) / (alpha + |z - x0|), alpha = softplus(raw_alpha), beta = -alpha + softplus(raw_beta).

    beta > -alpha for any raw parameters, so that F is invertible. Starts near the identity, all raw parameters from
    U(-1/sqrt(P), 1/sqrt(P)) as in Pyro.

    Args:
        layout: of theta; only P matters.
        generator: of the initial parameters.
    """

    recipe: ClassVar[Recipe] = PUBLISHED
    settings: ClassVar[tuple[str, ...]] = ()
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = "alpha = softplus(raw_alpha); beta = -alpha + softplus(raw_beta)"

    def __init__(self, layout: HeadLayout, generator: torch.Generator) -> None:
        super().__init__()
        dim = layout.num_params
        bound = 1 / math.sqrt(dim)
        self.x0 = nn.Parameter(uniform((dim,), bound, generator))
        self.raw_alpha = nn.Parameter(uniform((1,), bound, generator))
        self.raw_beta = nn.Parameter(uniform((1,), bound, generator))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The image of z (S, P) and log|det J| = (P - 1) log(1 + beta h) + log(1 + beta alpha h^2), (S,)."""
        alpha, beta = self._constrained()
        offset = z - self.x0
        h = 1 / (alpha + torch.linalg.vector_norm(offset, dim=-1, keepdim=True))
        stretch = beta * h
        log_det = (z.shape[-1] - 1) * torch.log1p(stretch) + torch.log1p(stretch * alpha * h)
        return torch.addcmul(z, stretch, offset), log_det.squeeze(-1)

    def inverse(self, y: Tensor) -> Tensor:
        """z (S, P) with F(z) = y: |y - x0| = R = r (1 + beta / (alpha + r)), a quadratic in r."""
        alpha, beta = self._constrained()
        offset = y - self.x0
        image_radius = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
        linear = alpha + beta - image_radius
        root = torch.sqrt(linear.square() + 4 * alpha * image_radius)
        # Of the two forms of the positive root, the one without cancellation; at the centre both are 0 / 0.
        safe = torch.where(root + linear > 0, root + linear, torch.ones_like(root))
        radius = torch.where(linear > 0, 2 * alpha * image_radius / safe, 0.5 * (root - linear))
        return self.x0 + offset / (1 + beta / (alpha + radius))

    def to_tensors(self) -> dict[str, Tensor]:
        """`x0` (P,), `raw_alpha` (1,), `raw_beta` (1,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: HeadLayout) -> Self:
        """The inverse of to_tensors."""
        return loaded(cls(layout, torch.Generator()), tensors)

    def summary(self) -> dict[str, float]:
        """alpha, beta and |x0|: beta near 0 does nothing, beta near -alpha contracts to a point."""
        with torch.no_grad():
            alpha, beta = self._constrained()
            return {"alpha": float(alpha), "beta": float(beta), "x0_norm": float(self.x0.norm())}

    def _constrained(self) -> tuple[Tensor, Tensor]:
        alpha = softplus(self.raw_alpha)
        return alpha, softplus(self.raw_beta) - alpha
