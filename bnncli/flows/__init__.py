"""Invertible layers, one file each: a flow posterior is a base Gaussian pushed through `length` of them."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor


class FlowLayer(Protocol):
    """What every layer offers; each is also an nn.Module, built as kind(dim, generator)."""

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The image of z (S, P) and log|det Jacobian| there, (S,)."""

    def inverse(self, y: Tensor) -> Tensor:
        """z (S, P) with forward(z) = y (S, P)."""

    def to_tensors(self) -> dict[str, Tensor]:
        """The unconstrained parameters, float64 on the CPU."""

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """The inverse of to_tensors."""

    def summary(self) -> dict[str, float]:
        """A few numbers that tell what the layer does."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Moves the layer, as every nn.Module does."""


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """Float64 numbers from U(-bound, bound), on the generator's device."""
    unit = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return (2 * unit - 1) * bound
