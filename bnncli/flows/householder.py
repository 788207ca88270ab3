"""Householder flow: a rotation about a learned centre, by two reflections.

Tomczak and Welling (2016), arXiv:1611.09630. One reflection is never near the identity; two along the same vector are
the identity, and together they turn the plane of their vectors by twice the angle between them.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bnncli.flows import ALL_DATA, Recipe, load_tensors, tensors_of, uniform, zeros
from bnncli.parameters.layouts import ParamLayout


class Householder(nn.Module):
    """F(z) = center + H(second) H(first) (z - center), H(v) = I - 2 v v^T / |v|^2; starts as the identity.

    It acts in weight space alone: a rotation does not change the standard normal of whitened space. Both vectors start
    equal, from U(-1, 1): at this length a step of Adam turns by about its learning rate whatever P is. The centre
    starts at 0.

    Args:
        layout: of theta; only P matters.
        generator: of the initial vectors.
    """

    recipe: ClassVar[Recipe] = ALL_DATA
    settings: ClassVar[tuple[str, ...]] = ()
    spaces: ClassVar[tuple[str, ...]] = ("weight",)
    spaces_reason: ClassVar[str] = (
        "a rotation does not change the standard normal of whitened space: use \0space\0 weight"
    )
    maps: ClassVar[str] = "z to center + H(second) H(first) (z - center), H(v) = I - 2 v v^T / |v|^2"

    def __init__(self, layout: ParamLayout, generator: torch.Generator) -> None:
        super().__init__()
        vector = uniform((layout.num_params,), 1.0, generator)
        self.first = nn.Parameter(vector)
        self.second = nn.Parameter(vector.clone())
        self.center = zeros(layout.num_params, generator=generator)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = 0, (S,)."""
        turned = _reflect(_reflect(z - self.center, self.first), self.second)
        return self.center + turned, z.new_zeros(z.shape[0])

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: the same reflections in reverse order."""
        return self.center + _reflect(_reflect(y - self.center, self.second), self.first)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `first`, `second` and `center`, (P,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator()), tensors)

    def summary(self) -> dict[str, float]:
        """Return the angle of the rotation, 0 to pi, and |center|."""
        with torch.no_grad():
            first, second = (vector / vector.norm() for vector in (self.first, self.second))
            # |u - w| and |u + w| resolve small angles that the cosine rounds away.
            between = 2 * torch.atan2((first - second).norm(), (first + second).norm())
            angle = 2 * torch.minimum(between, math.pi - between)
            return {"angle": float(angle), "center_norm": float(self.center.norm())}


def _reflect(z: Tensor, vector: Tensor) -> Tensor:
    """Return H(vector) z, (S, P)."""
    return z - (z @ vector).unsqueeze(-1) * (2 * vector / vector.square().sum())
