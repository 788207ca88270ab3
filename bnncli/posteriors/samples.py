"""Draws of a sampler, with their chain axis: what HMC returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.layout import HeadLayout
from bnncli.shapes import check_shapes


@dataclass(frozen=True)
class Samples:
    """Draws (C, T, P), float32, and the layout of theta."""

    type: ClassVar[str] = "samples"
    draws: Tensor
    layout: HeadLayout

    def __post_init__(self) -> None:
        check_shapes(draws=(self.draws, f"C T {self.layout.num_params}"))

    @property
    def center(self) -> Tensor:
        """The mean of the draws, (P,)."""
        return self.draws.double().mean(dim=(0, 1)).to(self.draws.dtype)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """A seeded choice without replacement, (S, P) float32; all draws in order for None or for more than there are."""
        flat = self.draws.flatten(0, 1)
        if num_samples is not None and num_samples < flat.shape[0]:
            order = torch.randperm(flat.shape[0], generator=generator, device=generator.device)
            flat = flat[order[:num_samples].to(flat.device)]
        return flat.float()

    def to(self, device: torch.device | str) -> Samples:
        """A copy on another device."""
        return replace(self, draws=self.draws.to(device))
