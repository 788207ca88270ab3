"""The step of a trust region by conjugate gradients (Steihaug 1983; Nocedal and Wright 2006, algorithm 7.2).

Where the curvature along a direction is not positive the step goes on along it up to the region's edge: saddles are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class BoundedStep(NamedTuple):
    """A step z (1, P).

    Args:
        promised: the increase of g^T z - z^T H z / 2.
        length: of z.
        is_inside: whether it solves H z = g, as exactly as was asked, rather than ending at the edge.
        decrement: sqrt(g^T z): where it is inside, the distance to the maximum in units of H.
    """

    z: Tensor
    promised: float
    length: float
    is_inside: bool
    decrement: float


def solve_within(
    multiply: Callable[[Tensor], Tensor], gradient: Tensor, *, radius: float, accuracy: float, most_products: int
) -> BoundedStep:
    """The step towards the maximum of g^T z - z^T H z / 2 for |z| <= radius.

    Args:
        multiply: by H, of (1, P), float64.
        gradient: g (1, P), float64.
        radius: of the region.
        accuracy: of |H z - g| relative to |g|.
        most_products: with H; the step that is there then is taken.
    """
    z, residual, direction = torch.zeros_like(gradient), gradient.clone(), gradient.clone()
    square = float(residual.square().sum())
    goal, is_inside = accuracy**2 * square, True
    for _ in range(most_products):
        if square <= goal:
            break
        product = multiply(direction)
        curvature, along, size = torch.stack(
            [(direction * one).sum() for one in (product, z, direction)]
        ).tolist()  # the one wait for the device, with the residual's
        length = square / curvature if curvature > 0 else math.inf
        reach = _to_edge(float(z.square().sum()), along, size, radius)
        is_inside = length < reach
        length = min(length, reach)
        if not math.isfinite(length):  # no curvature, and no edge
            break
        z = z + length * direction
        residual = residual - length * product
        if not is_inside:
            break
        previous, square = square, float(residual.square().sum())
        direction = residual + (square / previous) * direction
    slope = float((gradient * z).sum())
    promised = 0.5 * (slope + float((residual * z).sum()))
    return BoundedStep(z, promised, float(z.norm()), is_inside, math.sqrt(max(slope, 0.0)))


def _to_edge(square: float, along: float, size: float, radius: float) -> float:
    """t > 0 with |z + t d| = radius, for |z|^2, z^T d and |d|^2; inf without an edge."""
    if not math.isfinite(radius):
        return math.inf
    return (-along + math.sqrt(max(along**2 + size * (radius**2 - square), 0.0))) / size
