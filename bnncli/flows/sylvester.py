"""Sylvester flow: R planar bends at once, along orthonormal directions, each depending on the ones after it.

Van den Berg, Hasenclever, Tomczak and Welling (2018), arXiv:1803.05649, equations 8 to 13, with Q made of Householder
reflections; the inverse is by back-substitution, one monotone scalar equation for each direction.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bnncli.flows import ALL_DATA, SPACES, Recipe, resolve, tensors_of, zeros
from bnncli.flows._layers import orthonormal_columns, reflection_vectors
from bnncli.options.declaration import RANK
from bnncli.parameters.layouts import ParamLayout

# Bisecting an interval this often leaves less than a float64 rounding error of it.
_BISECTIONS = 60
# The most that a direction is squeezed: keeps 1 + slope away from 0 in float32 as well.
_MIN_STRETCH = 1e-6

SETTINGS = {"rank": RANK}


class Sylvester(nn.Module):
    """F(z) = z + Q A tanh(B Q^T z + bias), Q (P, R) orthonormal, A and B (R, R) upper triangular.

    a_ii b_ii = (1 - 1e-6) (exp(raw_i) - 1) > -1 for any parameters, so that F is invertible, and is 0 at the start:
    A = 0 and B = I, the identity.

    Args:
        layout: of theta; only P matters.
        generator: of the first directions Q, uniform.
        rank: R; 16 by default.

    Raises:
        UsageError: when rank is above P.
    """

    recipe: ClassVar[Recipe] = ALL_DATA
    settings: ClassVar[tuple[str, ...]] = tuple(SETTINGS)
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = (
        "Q = first columns of the Householder reflections along basis; B = triu(inner, 1) + diag(exp(diag(inner))); "
        "A = triu(outer, 1) + diag((1 - 1e-6) (exp(diag(outer)) - 1) / exp(diag(inner)))"
    )

    def __init__(self, layout: ParamLayout, generator: torch.Generator, *, rank: int | None = None) -> None:
        super().__init__()
        self.rank: int = resolve(SETTINGS, layout, rank=rank)["rank"]
        self.basis = reflection_vectors(layout.num_params, self.rank, generator)
        self.outer = zeros(self.rank, self.rank, generator=generator)
        self.inner = zeros(self.rank, self.rank, generator=generator)
        self.bias = zeros(self.rank, generator=generator)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = sum_i log(1 + (1 - tanh_i^2) a_ii b_ii), (S,)."""
        outer, inner, slope = self._constrained()
        basis = orthonormal_columns(self.basis)
        bend = torch.tanh(torch.addmm(self.bias, z @ basis, inner.T))
        log_det = torch.log1p((1 - bend.square()) * slope).sum(dim=1)
        return torch.addmm(z, bend @ outer.T, basis.T), log_det

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: the last direction first, each by bisection, exact to float64."""
        outer, inner, slope = self._constrained()
        basis = orthonormal_columns(self.basis)
        goal = y @ basis
        inside, bend = torch.zeros_like(goal), torch.zeros_like(goal)
        for i in reversed(range(self.rank)):
            later = self.bias[i] + inside[:, i + 1 :] @ inner[i, i + 1 :]
            rest = goal[:, i] - bend[:, i + 1 :] @ outer[i, i + 1 :]
            # c = b_ii a solves c + a_ii b_ii tanh(c + later) = b_ii rest, increasing in c.
            argument = _bisect(inner[i, i] * rest, slope[i], later)
            inside[:, i] = argument / inner[i, i]
            bend[:, i] = torch.tanh(argument + later)
        return y - bend @ outer.T @ basis.T

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `basis` (P, R), `outer` (R, R), `inner` (R, R), `bias` (R,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        layer = cls(layout, torch.Generator(), rank=tensors["bias"].shape[0])
        layer.load_state_dict(tensors)
        return layer

    def summary(self) -> dict[str, float]:
        """Return the smallest and the largest slope a_ii b_ii (0 does nothing, near -1 folds), and the size of A."""
        with torch.no_grad():
            outer, _, slope = self._constrained()
            return {
                "min_slope": float(slope.min()),
                "max_slope": float(slope.max()),
                "outer_norm": float(outer.norm()),
            }

    def _constrained(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return A, B, and a_ii b_ii (R,), above -1."""
        slope = (1 - _MIN_STRETCH) * self.outer.diagonal().expm1()
        inner_diagonal = self.inner.diagonal().exp()
        outer = self.outer.triu(1) + torch.diag(slope / inner_diagonal)
        return outer, self.inner.triu(1) + torch.diag(inner_diagonal), slope


def _bisect(goal: Tensor, slope: Tensor, later: Tensor) -> Tensor:
    """Return c (S,) with c + slope tanh(c + later) = goal, for slope > -1."""
    low, high = goal - slope.abs(), goal + slope.abs()
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        is_above = middle + slope * torch.tanh(middle + later) > goal
        high = torch.where(is_above, middle, high)
        low = torch.where(is_above, low, middle)
    return 0.5 * (low + high)
